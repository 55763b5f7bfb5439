"""Prints the lines that a person reads while a program runs, and ends it with one message and an exit code.

In: text. Out: standard output for what happens, standard error for what went wrong.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TextIO

import psutil

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # the shell's code for Ctrl-C
EXIT_RESUMABLE = 85  # SIGTERM or SIGUSR1 (Slurm, spot machines): saved, to be continued

_printed_at = -float("inf")


_listeners: list[Callable[[str], None]] = []


def say(line: str) -> None:
    """Prints one line at once, also where the output is a file."""
    _print(line, sys.stdout)


def warn(message: str) -> None:
    """Prints one line about what went wrong and did not stop the run."""
    _print(message, sys.stderr)
    for listener in _listeners:
        listener(message)


def printed_at() -> float:
    """Returns when the last line was printed (`time.monotonic()`)."""
    return _printed_at


def _print(line: str, to: TextIO) -> None:
    global _printed_at
    print(line, file=to, flush=True)
    _printed_at = time.monotonic()


def end_at_once(message: str) -> NoReturn:
    """Leaves the process with one message; kills all that it has started, and does no other clean-up."""
    warn(f"dapo: {message}")
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(EXIT_FAILED)


@contextmanager
def hearing_warnings(listener: Callable[[str], None]) -> Iterator[None]:
    """Has `listener` told of every warning until the block ends."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def end(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Leaves the program with one message."""
    warn(f"dapo: {message}")
    sys.exit(code)
