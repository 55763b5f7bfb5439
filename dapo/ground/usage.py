"""Measures the utilization of a role: levels over time, memory. It calls no other process."""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Returns the resident memory of the processes that are alive; shared pages count once per process."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUse:
    """What an update used on one rank. Made and read in `workers.training.update_metrics`. device: its name; "" on a
    CPU. gpu_peak_bytes: peak of torch's allocated memory during the update."""

    resident_bytes: int
    device: str = ""
    gpu_peak_bytes: int = 0


class Level:
    """Tracks a number over time, such as the length of a queue, from 0. now: returns seconds of any origin."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now()
        self._value = self._area = self._peak = 0.0

    @property
    def value(self) -> float:
        return self._value

    def set(self, value: float) -> None:
        now = self._now()
        self._area += self._value * (now - self._since)
        self._value, self._since = value, now
        self._peak = max(self._peak, value)

    def add(self, change: float) -> None:
        self.set(self._value + change)

    def area(self) -> float:
        """Returns the time integral so far; its increase divided by the elapsed seconds is the mean."""
        return self._area + self._value * (self._now() - self._since)

    def peak(self) -> float:
        """Returns the maximum since the last call."""
        peak, self._peak = self._peak, self._value
        return peak
