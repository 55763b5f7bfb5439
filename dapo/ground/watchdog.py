"""Reports what a program waits for, so that neither a long wait nor a long step looks like a hang.

    with waiting("..."): ─▶ the open waits ─▶ a thread looks at them ─▶ a line per kind, every `logging.watchdog_s`

Each wait for something remote or slow has an entry. A line is for example `still waiting for 2 of 64 actor ranks
(the update from policy version 17), after 90 s: 3, 17`. A wait is reported when it is older than the interval, and
again after each interval. If nothing else was printed for an interval, the oldest wait is reported whatever its age. A
thread does this, because a blocked event loop is a wait too.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from dapo.ground import console

NUMBERS = 16  # of members that are listed
LOOK_S = 1.0  # between two looks at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One of several alike: `engine 3 to start` of `count` engines. act: what it is expected to do."""

    role: str
    number: int
    count: int
    act: str

    def __str__(self) -> str:
        return f"{self.role} {self.number} {self.act}".rstrip()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Wait:
    what: str | Member
    began: float
    detail: Callable[[], str]
    silent: Callable[[], float] | None
    each: str

    @property
    def kind(self) -> tuple[str, ...]:
        return (self.what.role, self.what.act) if isinstance(self.what, Member) else (self.what,)

    def overdue(self, now: float) -> float:
        """Returns the seconds without progress of the wait."""
        return self.silent() if self.silent is not None else now - self.began


_open: dict[int, _Wait] = {}
_numbers = itertools.count()


@contextmanager
def waiting(
    what: str | Member,
    detail: Callable[[], str] = lambda: "",
    *,
    silent: Callable[[], float] | None = None,
    each: str = "",
) -> Iterator[None]:
    """Lets the watchdog report the block while it runs. what: follows "still waiting for"; waits with the same text,
    or the same role and act, share a line. detail: the progress, shown after it; called in another thread. silent:
    seconds since the last sign of life, used in place of the age of the wait. each: a plural noun for waits that
    share a text."""
    number = next(_numbers)
    _open[number] = _Wait(what=what, began=time.monotonic(), detail=detail, silent=silent, each=each)
    try:
        yield
    finally:
        del _open[number]


class Watchdog:
    """Context manager that reports long waits with `say`. every_s: seconds, `logging.watchdog_s`."""

    def __init__(
        self,
        every_s: float,
        *,
        say: Callable[[str], None] = console.say,
        before: Callable[[float], None] = lambda now: None,
    ) -> None:
        """before: called at each look with `time.monotonic()`; anything it prints counts as output."""
        self._every_s = every_s
        self._say = say
        self._before = before
        self._began = time.monotonic()
        self._told: dict[tuple[str, ...], float] = {}  # when, by kind
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(min(LOOK_S, self._every_s / 4)):
            self.look()

    def look(self) -> None:
        self._before(time.monotonic())
        for line in self.due(time.monotonic()):
            self._say(line)

    def due(self, now: float) -> list[str]:
        """Returns the lines that are due at `now` (`time.monotonic()`)."""
        quiet_s = now - max(self._began, console.printed_at())
        waits = list(_open.values())
        open_kinds = {wait.kind for wait in waits}
        self._told = {kind: at for kind, at in self._told.items() if kind in open_kinds}
        late: dict[tuple[str, ...], list[_Wait]] = {}
        for wait in waits:
            if wait.overdue(now) >= self._every_s and now - self._told.get(wait.kind, -math.inf) >= self._every_s:
                late.setdefault(wait.kind, []).append(wait)
        if not late and quiet_s >= self._every_s and waits:
            oldest = min(waits, key=lambda wait: wait.began)
            late = {oldest.kind: [wait for wait in waits if wait.kind == oldest.kind]}
        self._told |= dict.fromkeys(late, now)
        return [_line(those, now) for those in late.values()]


def awaited(now: float) -> list[str]:
    """Returns a line for each kind of open waits, the longest first."""
    kinds: dict[tuple[str, ...], list[_Wait]] = {}
    for wait in sorted(_open.values(), key=lambda wait: wait.began):
        kinds.setdefault(wait.kind, []).append(wait)
    return [_line(those, now) for those in kinds.values()]


def _line(waits: list[_Wait], now: float) -> str:
    oldest = min(waits, key=lambda wait: wait.began)
    what, detail = oldest.what, oldest.detail()
    if isinstance(what, Member):
        numbers = sorted({wait.what.number for wait in waits if isinstance(wait.what, Member)})
        if len(numbers) > 1:
            detail = "" if len(numbers) == what.count else _listed(numbers)
            what = f"{_share(len(numbers), what.count)} {what.role}s {what.act}".rstrip()
    elif oldest.each:
        detail = f"{len(waits)} {oldest.each}, the oldest {now - oldest.began:.0f} s"
    return f"still waiting for {what}, after {now - oldest.began:.0f} s{f': {detail}' if detail else ''}"


def _share(number: int, count: int) -> str:
    return f"all {count}" if number == count else f"{number} of {count}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:NUMBERS])) + (", ..." if len(numbers) > NUMBERS else "")
