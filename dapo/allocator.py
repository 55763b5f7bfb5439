"""Looks for expandable segments of torch's allocator where engines read weights in memory of ranks.

In: a configuration, and the environment of the process. Out: what is wrong with it, for the doctor and for a rank.
"""

import os
import re

from dapo.config.schema import Config
from dapo.derived import LENT_TRANSPORT, lends, resolve_transport

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch looks at the first that is set
REMEDY = "leave expandable_segments out on every node, before Ray starts there"


def hands_over_memory(cfg: Config) -> bool:
    """Returns whether ranks on GPUs hand weights to engines in memory of a GPU."""
    return cfg.trainer.only == "both" and (lends(cfg) or resolve_transport(cfg) == LENT_TRANSPORT)


def expandable_segments() -> str:
    """Returns what they would break; empty where this process's environment leaves them off. Another process opens such
    memory by taking a file of the rank's (pidfd_getfd): containers and Yama forbid that."""
    name = next((each for each in VARIABLES if os.environ.get(each)), VARIABLES[0])
    given = os.environ.get(name, "")
    if not re.search(r"expandable_segments\s*:\s*(true|1)", given, re.IGNORECASE):
        return ""
    return (
        f"{name} ({given}): memory in expandable segments is opened by another process only with the right to trace "
        "the rank, which containers do not give; engines take their weights from such memory (transport ipc)"
    )


def check_allocator(cfg: Config, device: str) -> None:
    """Raises ValueError in a rank's process whose memory engines could not open. device: the rank's."""
    if device == "cuda" and cfg.trainer.preflight and hands_over_memory(cfg) and (found := expandable_segments()):
        raise ValueError(f"{found}; {REMEDY} (trainer.preflight=false starts the run all the same)")
