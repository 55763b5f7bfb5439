"""Measures where the wall time of a step goes: per phase, and the driver's own share.

In: `with clock("generation"):` around each wait. Out: seconds in which at least one wait of the phase was open, and as
`driver` the seconds in which none was; and when that was, with what the pools had to do meanwhile.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dapo.measure.usage import Course

PARTS = 60  # of a timeline, in which the levels of the pools are told
FINEST = 500  # of a timeline: shorter gaps between two spans of a phase are left out


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Says that a lane was at `level`, on average, from `began` to `ended`: seconds since the step began, below 0 what
    lies between it and the step before. Made by `PhaseClock.timeline`, consumed by the sample store.

    lane: a phase, whose level is 1, or what `Pools.work` names.
    """

    lane: str
    began: float
    ended: float
    level: float


class PhaseClock:
    """Measures phases that may overlap and nest: a group is scored while others are generated."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self.since: dict[str, float] = {}  # when each phase that is open now began (`time.monotonic()`)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last = self._began = self._told = time.monotonic()
        self._spans: list[Span] = []  # that have ended since `_told`, in `time.monotonic()`

    def _advance(self) -> None:
        now = time.monotonic()
        active = [phase for phase, count in self._open.items() if count]
        for phase in active or ["driver"]:
            self._seconds[phase] += now - self._last
        self._last = now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Counts the time until the block ends towards `phase`."""
        self._advance()
        self._open[phase] += 1
        self.since.setdefault(phase, self._last)
        try:
            yield
        finally:
            self._advance()
            self._open[phase] -= 1
            if not self._open[phase]:
                self._spans.append(self._span(phase, self.since.pop(phase), self._last))

    def note(self, lane: str, began: float) -> None:
        """Has the timeline show a lane from `began` (`time.monotonic()`) until now, whose seconds are not counted."""
        self._spans.append(self._span(lane, began, time.monotonic()))

    def _span(self, lane: str, began: float, ended: float) -> Span:
        return Span(lane=lane, began=max(began, self._told), ended=ended, level=1.0)

    def timeline(self, work: Mapping[str, Course]) -> list[Span]:
        """Returns what went on since the last timeline, phases that are open included, each in its order; times count
        from the beginning of the lap. work: see `Pools`; told in `PARTS` parts."""
        now = time.monotonic()
        found = [*self._spans, *(self._span(phase, began, now) for phase, began in self.since.items())]
        found = _joined(found, (now - self._told) / FINEST)
        for lane, course in work.items():
            for began, ended, level in course.lap(self._told, now, PARTS):
                found.append(Span(lane=lane, began=began, ended=ended, level=level))
        self._spans, self._told = [], now
        return [replace(span, began=span.began - self._began, ended=span.ended - self._began) for span in found]

    def lap(self) -> dict[str, float]:
        """Returns the seconds per phase since the last lap, with `driver` and the wall time as `step`; starts the next
        lap."""
        self._advance()
        seconds = {"driver": 0.0, **self._seconds, "step": self._last - self._began}
        self._seconds.clear()
        self._began = self._last
        return seconds


def _joined(spans: list[Span], gap: float) -> list[Span]:
    """Returns the spans with those of a lane made one that are not further apart than `gap` seconds; none of a lane may
    overlap another."""
    found: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.began):
        of_lane = found.setdefault(span.lane, [])
        if of_lane and span.began - of_lane[-1].ended <= gap:
            of_lane[-1] = replace(of_lane[-1], ended=span.ended)
        else:
            of_lane.append(span)
    return [span for of_lane in found.values() for span in of_lane]
