"""Injects a fault at a named point, for tests of recovery: `DAPO_FAULT=POINT:ACTION@N[,...]`.

Ray's workers inherit these environment variables from the driver. N counts how often a process passes the point, from
1; `*` stands for every time. With `DAPO_FAULT_ONCE=DIRECTORY` only the first process that gets there fails. Actions:
`kill`, `stop` and `term` (signals to itself), `raise` (RuntimeError), `full` (OSError of a full disk), `sleep`
(`SLEEP_S`); any other is returned, and the code at the point defines its meaning.
"""

import errno
import os
import signal
import time
from collections import Counter
from pathlib import Path

VARIABLE, ONCE = "DAPO_FAULT", "DAPO_FAULT_ONCE"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
SLEEP_S = 20.0  # longer than a step of the tiny experiment

_passed: Counter[str] = Counter()


def fault_point(point: str) -> str:
    """Performs the action of `DAPO_FAULT` at this point and returns it, since some are left to the caller; "" for
    none."""
    faults = os.environ.get(VARIABLE)
    if not faults:
        return ""
    _passed[point] += 1
    for fault in faults.split(","):
        where, _, rest = fault.partition(":")
        action, _, count = rest.partition("@")
        if where == point and count in ("*", str(_passed[point])) and _is_first(fault):
            return _do(action, point)
    return ""


def fault_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in (VARIABLE, ONCE) if name in os.environ}


def _is_first(fault: str) -> bool:
    directory = os.environ.get(ONCE)
    if not directory:
        return True
    try:
        (Path(directory) / fault).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _do(action: str, point: str) -> str:
    if action in SIGNALS:
        os.kill(os.getpid(), SIGNALS[action])
    elif action == "raise":
        raise RuntimeError(f"{VARIABLE} asked for this failure at {point}")
    elif action == "sleep":
        time.sleep(SLEEP_S)
    elif action == "full":
        raise OSError(errno.ENOSPC, f"{VARIABLE} asked for a full disk at {point}")
    return action
