"""Detects expandable segments of torch's allocator where engines read weights from the memory of ranks."""

import os
import re

from dapo.config.schema import Config
from dapo.derived import LENT_TRANSPORT, lends, resolve_transport

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch uses the first that is set
REMEDY = "leave expandable_segments out on every node, before Ray starts there"


def hands_over_memory(cfg: Config) -> bool:
    """Whether ranks pass weights to engines through GPU memory."""
    return cfg.trainer.only == "both" and (lends(cfg) or resolve_transport(cfg) == LENT_TRANSPORT)


def expandable_segments() -> str:
    """Describes the problem of expandable segments; empty if this process's environment leaves them off. Another
    process opens such memory with a file descriptor of the rank (pidfd_getfd); containers and Yama forbid that."""
    name = next((each for each in VARIABLES if os.environ.get(each)), VARIABLES[0])
    given = os.environ.get(name, "")
    if not re.search(r"expandable_segments\s*:\s*(true|1)", given, re.IGNORECASE):
        return ""
    return (
        f"{name} ({given}): memory in expandable segments is opened by another process only with the right to trace "
        "the rank, which containers do not give; engines take their weights from such memory (transport ipc)"
    )


def check_allocator(cfg: Config, device: str) -> None:
    """Raises ValueError in a rank whose memory engines could not open. device: the rank's."""
    if device == "cuda" and cfg.trainer.preflight and hands_over_memory(cfg) and (found := expandable_segments()):
        raise ValueError(f"{found}; {REMEDY} (trainer.preflight=false starts the run all the same)")
