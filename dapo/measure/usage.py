"""Measures what a role makes of its machine: levels over time, memory, and the share of a GPU's arithmetic.

In: what a role knows while it works. Out: numbers for the metrics of `perf/`. Nothing here asks another process.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

# FLOP/s of dense bfloat16 products, by words in the name that torch gives a device; from the maker's data sheets, where
# "with sparsity" is halved. The first that fits counts: H100's other builds come before H100.
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
}


def peak_flops(device: str) -> float | None:
    """Returns the FLOP/s of a device by its name, as `PEAK_FLOPS` has them; None where it is not known."""
    words = f" {device.replace('-', ' ')} "
    return next((peak for name, peak in PEAK_FLOPS.items() if f" {name} " in words), None)


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
