"""The clock of phases and the load of pools over time, with a clock that the test moves; peaks of devices; memory."""

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from dapo.config.devices import peak_flops
from dapo.ground.clock import PhaseClock
from dapo.ground.usage import Level, resident_bytes
from dapo.report.trace import Trace


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("dapo.ground.clock.time.monotonic", made)
    return made


def test_the_clock_counts_overlaps_once_and_the_rest_as_driver(clock: Clock) -> None:
    phases = PhaseClock()
    with phases("generation"):
        clock.now += 1
        with phases("generation"), phases("reward"):
            clock.now += 2
    clock.now += 4
    assert phases.lap() == {"driver": 4.0, "generation": 3.0, "reward": 2.0, "step": 7.0}
    assert phases.lap() == {"driver": 0.0, "step": 0.0}


def test_each_stretch_of_a_phase_is_in_the_trace(clock: Clock, tmp_path: Path) -> None:
    for _ in range(2):  # of a run that goes on, too
        phases = PhaseClock(Trace(tmp_path))
        for pause in (0.05, 1.0, 0.0):
            with phases("generation"), phases("reward"):
                clock.now += 2
            clock.now += pause
        phases.lap()
    events = json.loads((tmp_path / "trace.json").read_text().rstrip(",\n") + "]")
    spans = [(one["name"], one["dur"] / 1e6) for one in events if one["ph"] == "X"]
    each = [*[(name, seconds) for name in ("reward", "generation") for seconds in (4.05, 2.0)], ("step", 7.05)]
    assert sorted(spans) == sorted(2 * each)
    assert len({one["tid"] for one in events}) == 3


def test_a_level_has_the_mean_over_time_and_the_greatest_since_it_was_asked(clock: Clock) -> None:
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
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
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
    assert 5e6 < resident_bytes([own, handle]) == pytest.approx(own.memory_info().rss, rel=0.2)
