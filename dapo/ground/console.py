"""Prints the console lines of a program, and ends it with one message and an exit code. Lines may quote a model, a file
or a server; control characters and secrets (of an address or the environment) are removed. Progress goes to standard
output, problems to standard error."""

import atexit
import contextlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TextIO

import psutil

from dapo.ground.redact import without_secrets

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # the shell's code for Ctrl-C
EXIT_RESUMABLE = 85  # SIGTERM, SIGUSR1 (Slurm, spot machines) or SIGHUP: saved, to be continued

AGAIN_S = 3600.0  # after which a warning that comes again is printed again
# Warnings that differ only in these measures are repeats; other numbers identify an engine or a count.
_MEASURE = re.compile(r"\b\d[\d.,]*(?= ?(?:%|(?:ms|s|min|h|bytes|B|[KMGT]i?B|tokens|lines|groups|rows)\b))")
# Every loss of a worker is printed: a hidden second loss would leave the user with the wrong cause.
_LOSS = re.compile(r"\b(?:(?:is|are|was|were) (?:lost|replaced)|did not start)\b")

_printed_at = -float("inf")
_code = 0  # exit code of the program


def say(line: str) -> None:
    _print(line, sys.stdout)


class _Warnings:
    """Warnings of one run. listener: called with every warning. repeated: counts of those not printed, by text; fresh:
    how many of them no step line has reported yet."""

    def __init__(self, listener: Callable[[str], None]) -> None:
        self.listener = listener
        self.repeated: Counter[str] = Counter()
        self.fresh = 0
        self._printed: dict[str, float] = {}

    def is_new(self, message: str) -> bool:
        """Whether to print it; counts it if not. Every loss of a worker is new."""
        if _LOSS.search(message):
            return True
        text, now = _MEASURE.sub("#", message), time.monotonic()
        if now - self._printed.get(text, -float("inf")) >= AGAIN_S:
            self._printed[text] = now
            return True
        self.repeated[text] += 1
        self.fresh += 1
        return False


_runs: list[_Warnings] = []  # the current run is the last; empty: every warning is printed


def warn(message: str) -> None:
    """Prints a problem that did not stop the run. In the block of `hearing_warnings` the same text is printed once an
    hour and its repeats are counted, unless it is the loss of a worker."""
    if not _runs or _runs[-1].is_new(message):
        _print(message, sys.stderr)
    for run in _runs:
        run.listener(message)


def take_repeated() -> int:
    """Returns the number of unprinted warnings since the last call."""
    if not _runs:
        return 0
    count, _runs[-1].fresh = _runs[-1].fresh, 0
    return count


def printed_at() -> float:
    """Returns when the last line was printed or `seen` was called (`time.monotonic()`)."""
    return _printed_at


def seen() -> None:
    """Records that the user sees progress without a printed line (`printed_at`)."""
    global _printed_at
    _printed_at = time.monotonic()


def plain(text: str) -> str:
    """Replaces characters that would control a terminal; keeps line breaks."""
    return "\n".join(line if line.isprintable() else "".join(map(_letter, line)) for line in text.split("\n"))


def _letter(letter: str) -> str:
    return letter if letter.isprintable() else " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"


def _print(line: str, to: TextIO) -> None:
    """Prints, never raising: a full disk, closed pipe or unencodable letter must not end a run or thread."""
    encoding = getattr(to, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError):
        print(plain(without_secrets(line)).encode(encoding, "replace").decode(encoding), file=to, flush=True)
    seen()


@atexit.register
def _let_go() -> None:
    """Discards output that no stream accepts any more; otherwise Python's shutdown fails and exits with 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except ValueError:  # it is closed
            continue


def end_at_once(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Ends the process with one message; kills all its descendants, without any other clean-up."""
    _print(f"dapo: {message}", sys.stderr)
    _vanish(code)


def vanish_at_exit() -> None:
    """At exit, kills all descendants and skips Python's clean-up, where a library could wait forever."""
    atexit.register(lambda: _vanish(_code or int(hasattr(sys, "last_type"))))


def _vanish(code: int) -> NoReturn:
    _let_go()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # a library's threads may still print errors
        os.dup2(nowhere, stream)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(code)


@contextmanager
def hearing_warnings(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls `listener` with every warning in the block. Each text is printed once an hour, repeat counts at the end."""
    run = _Warnings(listener)
    _runs.append(run)
    try:
        yield
    finally:
        _runs.remove(run)
        for text, count in run.repeated.items():
            _print(f"{count} more times: {text}", sys.stderr)


def end(message: str, code: int = EXIT_FAILED) -> NoReturn:
    global _code
    _print(f"dapo: {message}", sys.stderr)
    _code = code
    sys.exit(code)
