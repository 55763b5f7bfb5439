"""What roles make of their machines: levels over time, memory, the arithmetic of a device."""

import subprocess

import psutil
import pytest

from dapo.config.devices import peak_flops
from dapo.measure.usage import Level, resident_bytes


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_level_has_the_mean_over_time_and_the_greatest_since_it_was_asked() -> None:
    clock = Clock()
    level = Level(clock)
    clock.now += 10
    level.set(4)
    clock.now += 2
    level.add(-3)
    assert (level.value, level.area()) == (1.0, 8.0)
    clock.now += 5
    assert level.area() == level.area() == 13.0
    assert [level.peak(), level.peak()] == [4.0, 1.0]
    level.set(0)
    clock.now += 50
    assert (level.area(), level.peak(), level.peak()) == (13.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA GB200", 2500e12),
        ("Tesla V100-SXM2-16GB", None),
        ("", None),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak


def test_a_process_that_has_ended_takes_no_memory() -> None:
    gone = subprocess.Popen(["true"])
    handle = psutil.Process(gone.pid)
    gone.wait()
    own = psutil.Process()
    both = resident_bytes([own, handle])
    assert 5e6 < both == pytest.approx(own.memory_info().rss, rel=0.2)
