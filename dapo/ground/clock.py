"""Measures the wall time of a step per phase, and the driver's own share. Use `with clock("generation"):` around each
wait. A phase counts the seconds in which at least one of its waits was open; `driver` counts those in which none was
open."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

JOINED_S = 0.1  # a phase that begins again within this is traced as one


class PhaseClock:
    """Measures phases that may overlap and nest: a group is scored while others are generated."""

    def __init__(self, trace: Callable[[str, float, float], None] = lambda phase, began, ended: None) -> None:
        """trace: called with each interval of a phase: its name, begin and end (`time.monotonic()`)."""
        self._trace = trace
        self._open: Counter[str] = Counter()
        self.since: dict[str, float] = {}  # when each phase that is open now began (`time.monotonic()`)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last = self._began = time.monotonic()
        self._ended: dict[str, tuple[float, float]] = {}  # the last stretch of each phase, not traced yet

    def _advance(self) -> None:
        now = time.monotonic()
        active = [phase for phase, count in self._open.items() if count]
        for phase in active or ["driver"]:
            self._seconds[phase] += now - self._last
        self._last = now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._advance()
        self._open[phase] += 1
        self.since.setdefault(phase, self._last)
        try:
            yield
        finally:
            self._advance()
            self._open[phase] -= 1
            if not self._open[phase]:
                self._end(phase, self.since.pop(phase))

    def _end(self, phase: str, began: float) -> None:
        before, until = self._ended.get(phase, (began, began))
        if began - until > JOINED_S:
            self._trace(phase, before, until)
            before = began
        self._ended[phase] = before, self._last

    def lap(self) -> dict[str, float]:
        """Returns the seconds per phase since the last call, with `driver` and the wall time as `step`."""
        self._advance()
        for phase, (began, ended) in self._ended.items():
            self._trace(phase, began, ended)
        self._ended.clear()
        self._trace("step", self._began, self._last)
        seconds = {"driver": 0.0, **self._seconds, "step": self._last - self._began}
        self._seconds.clear()
        self._began = self._last
        return seconds
