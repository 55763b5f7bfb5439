"""Prints the lines that a person reads while a program runs, and ends it with one message and an exit code.

In: text, which may quote what a model, a file or a server says. Out: standard output for what happens, standard error
for what went wrong; no control character in either, and no secret of an address or of the environment.
"""

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

from dapo.report.redact import without_secrets

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # the shell's code for Ctrl-C
EXIT_RESUMABLE = 85  # SIGTERM, SIGUSR1 (Slurm, spot machines) or SIGHUP: saved, to be continued

AGAIN_S = 3600.0  # after which a warning that comes again is printed again
# Of two warnings that differ in these numbers alone, the second says nothing new; others say which engine, how often.
_MEASURE = re.compile(r"\b\d[\d.,]*(?= ?(?:%|(?:ms|s|min|h|bytes|B|[KMGT]i?B|tokens|lines|groups|rows)\b))")
# Who reads of the second loss of an engine an hour later looks for another reason why nothing goes on.
_LOSS = re.compile(r"\b(?:(?:is|are|was|were) (?:lost|replaced)|did not start)\b")

_printed_at = -float("inf")
_code = 0  # with which the program ends


def say(line: str) -> None:
    """Prints one line at once, also where the output is a file."""
    _print(line, sys.stdout)


class _Warnings:
    """Holds what was warned of in one run. listener: told of every warning. repeated: those that were not printed, by
    text; fresh: how many of them no step line has told yet."""

    def __init__(self, listener: Callable[[str], None]) -> None:
        self.listener = listener
        self.repeated: Counter[str] = Counter()
        self.fresh = 0
        self._printed: dict[str, float] = {}

    def is_new(self, message: str) -> bool:
        """Returns whether to print it, and counts it if not. Every loss of a worker is new."""
        if _LOSS.search(message):
            return True
        text, now = _MEASURE.sub("#", message), time.monotonic()
        if now - self._printed.get(text, -float("inf")) >= AGAIN_S:
            self._printed[text] = now
            return True
        self.repeated[text] += 1
        self.fresh += 1
        return False


_runs: list[_Warnings] = []  # the one under way is the last; none: every warning is printed


def warn(message: str) -> None:
    """Prints one line about what went wrong and did not stop the run; while a run has `hearing_warnings`, once an hour,
    and what comes again between is counted, unless it is the loss of a worker."""
    if not _runs or _runs[-1].is_new(message):
        _print(message, sys.stderr)
    for run in _runs:
        run.listener(message)


def take_repeated() -> int:
    """Counts the warnings that were not printed since the last call."""
    if not _runs:
        return 0
    count, _runs[-1].fresh = _runs[-1].fresh, 0
    return count


def printed_at() -> float:
    """Returns when the last line was printed (`time.monotonic()`), or `seen` was called."""
    return _printed_at


def seen() -> None:
    """Notes that a person sees what goes on, without a line of its own."""
    global _printed_at
    _printed_at = time.monotonic()


def plain(text: str) -> str:
    """Returns a text without characters that do something to a terminal; line breaks stay."""
    return "\n".join(line if line.isprintable() else "".join(map(_letter, line)) for line in text.split("\n"))


def _letter(letter: str) -> str:
    return letter if letter.isprintable() else " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"


def _print(line: str, to: TextIO) -> None:
    """Prints what can be printed: no run, and no thread of one, ends because its log is on a full disk, who read it has
    gone, or a letter is not in its encoding."""
    encoding = getattr(to, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError):
        print(plain(without_secrets(line)).encode(encoding, "replace").decode(encoding), file=to, flush=True)
    seen()


@atexit.register
def _let_go() -> None:
    """Drops what no stream takes any more: Python's end would fail over it, and its code 120 stand for ours."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except ValueError:  # it is closed
            continue


def end_at_once(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Leaves the process with one message; kills all that it has started, and does no other clean-up."""
    _print(f"dapo: {message}", sys.stderr)
    _vanish(code)


def vanish_at_exit() -> None:
    """Has the process kill all that it has started and leave when Python would begin to clean up: a library would wait
    there for what never comes."""
    atexit.register(lambda: _vanish(_code or int(hasattr(sys, "last_type"))))


def _vanish(code: int) -> NoReturn:
    _let_go()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # a library's threads may still have words on what it ends for
        os.dup2(nowhere, stream)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(code)


@contextmanager
def hearing_warnings(listener: Callable[[str], None]) -> Iterator[None]:
    """Has `listener` told of every warning until the block ends, and prints each text once an hour. What came again is
    told at the end, with a count."""
    run = _Warnings(listener)
    _runs.append(run)
    try:
        yield
    finally:
        _runs.remove(run)
        for text, count in run.repeated.items():
            _print(f"{count} more times: {text}", sys.stderr)


def end(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Leaves the program with one message."""
    global _code
    _print(f"dapo: {message}", sys.stderr)
    _code = code
    sys.exit(code)
