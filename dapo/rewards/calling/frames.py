"""Frames between a reward worker and its processes: as `dapo.sandbox.program`, but numpy values become Python values
and other values without a JSON form become text."""

from typing import Any

import numpy as np

from dapo.sandbox import program
from dapo.sandbox.program import HEADER, read_frame

__all__ = ["EXIT_MEMORY", "HEADER", "MAX_REPLY_BYTES", "pack", "read_frame"]

EXIT_MEMORY = 77  # exit status of a process at its memory limit
MAX_REPLY_BYTES = 1 << 20  # maximum size of a reply


def pack(value: Any) -> bytes:
    return program.pack(value, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
