"""Measures what a role makes of its machine: levels over time, memory.

In: what a role knows while it works. Out: numbers for the metrics of `perf/`. Nothing here asks another process.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import psutil

MAX_POINTS = 1024  # of a `Course` that nobody asks for


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Returns the resident memory of those that still run; pages that they share count once for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUse:
    """Says what an update took of one rank. Made in its process, consumed by `workers.training.use`.

    device: its name; "" on a CPU. gpu_peak_bytes: the most that torch held allocated during the update.
    """

    resident_bytes: int
    device: str = ""
    gpu_peak_bytes: int = 0


class Level:
    """Follows a number over time, such as the length of a queue; 0 at first."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begins at 0. now: seconds, of any origin."""
        self._now = now
        self._since = now()
        self._value = self._area = self._peak = 0.0

    @property
    def value(self) -> float:
        """Returns the number as it is."""
        return self._value

    def set(self, value: float) -> None:
        """Notes that the number is another from now on."""
        now = self._now()
        self._area += self._value * (now - self._since)
        self._value, self._since = value, now
        self._peak = max(self._peak, value)

    def add(self, change: float) -> None:
        """Notes a change of the number."""
        self.set(self._value + change)

    def area(self) -> float:
        """Returns the integral over the time so far: its growth, divided by the seconds, is the mean."""
        return self._area + self._value * (self._now() - self._since)

    def peak(self) -> float:
        """Returns the greatest since it was last asked."""
        peak, self._peak = self._peak, self._value
        return peak


class Course(Level):
    """Follows a number over time, and keeps how it went since `lap` was last called: whatever the number of changes, in
    at most `MAX_POINTS` points, between which its mean stays known."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begins at 0. now: seconds, of any origin."""
        super().__init__(now)
        self._points = [(self._since, 0.0)]  # moments, with the integral up to each

    def set(self, value: float) -> None:
        """Notes that the number is another from now on."""
        super().set(value)
        if len(self._points) == MAX_POINTS:
            del self._points[1::2]
        self._points.append((self._since, self._area))

    def lap(self, since: float, until: float, parts: int) -> list[tuple[float, float, float]]:
        """Returns (began, ended, mean) of those of equally many seconds between two moments in which the number was not
        0, and forgets what was before `until`. It counts as 0 before it was made, and before the last lap."""
        self._points.append((self._now(), self.area()))
        moments, areas = zip(*self._points, strict=True)
        edges = np.linspace(since, until, parts + 1)
        means = np.diff(np.interp(edges, moments, areas)) * parts / max(until - since, 1e-9)
        self._points = [self._points[-1]]
        found = zip(edges[:-1].tolist(), edges[1:].tolist(), means.tolist(), strict=True)
        return [each for each in found if each[2] > 1e-9]
