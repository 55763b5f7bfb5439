"""The clock of phases and the load of pools over time, with a clock that the test moves; peaks of devices; memory."""

import subprocess

import psutil
import pytest

from dapo.config.devices import peak_flops
from dapo.measure.clock import PARTS, PhaseClock, Span
from dapo.measure.usage import Course, Level, resident_bytes


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("dapo.measure.clock.time.monotonic", made)
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


def test_a_timeline_has_each_phase_and_the_load_of_each_pool_and_is_cut_where_the_step_ends(clock: Clock) -> None:
    def span(lane: str, began: float, ended: float, level: float = 1.0) -> Span:
        return Span(lane=lane, began=began, ended=ended, level=level)

    phases, engine, idle = PhaseClock(), Course(clock), Course(clock)
    with phases("save"):
        clock.now += 4
    clock.now += 1
    phases.lap()  # the step begins
    generation = phases("generation")
    generation.__enter__()
    clock.now += PARTS / 2
    engine.add(8)
    with phases("generation"), phases("reward"):
        clock.now += PARTS / 2
        phases.note("aside", clock.now - 12)
    found = phases.timeline({"engine 0": engine, "engine 1": idle})
    assert [one for one in found if one.lane != "engine 0"] == [
        span("save", -5, -1),
        span("generation", 0, PARTS),
        span("reward", PARTS / 2, PARTS),
        span("aside", PARTS - 12, PARTS),
    ]
    load = sum((one.ended - one.began) * one.level for one in found if one.lane == "engine 0")
    assert load == pytest.approx(8 * PARTS / 2)
    phases.lap()
    assert set(phases.since) == {"generation"}, "for who looks meanwhile"
    clock.now += 2
    generation.__exit__(None, None, None)
    clock.now += 3
    phases.note("aside", clock.now - 100)
    assert phases.timeline({}) == [span("generation", 0, 2), span("aside", 0, 5)]


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
