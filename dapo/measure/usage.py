"""Measures what a role makes of its machine: levels over time, memory.

In: what a role knows while it works. Out: numbers for the metrics of `perf/`. Nothing here asks another process.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil


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
