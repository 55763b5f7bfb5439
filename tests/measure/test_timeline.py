"""When each phase of a step was open and how busy the pools were meanwhile: against a picture by hand, and sampled."""

import random
from collections.abc import Iterator

import pytest

from dapo.measure.clock import FINEST, PARTS, PhaseClock, Span
from dapo.measure.usage import MAX_POINTS, Course


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("dapo.measure.clock.time.monotonic", self)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    yield Clock(monkeypatch)


def phase(name: str, began: float, ended: float, level: float = 1.0) -> Span:
    return Span(lane=name, began=began, ended=ended, level=level)


def test_a_timeline_has_each_phase_when_it_was_open_and_is_cut_where_the_step_ends(clock: Clock) -> None:
    phases = PhaseClock()
    with phases("save"):
        clock.now += 4
    clock.now += 1
    phases.lap()  # the step begins
    generation = phases("generation")
    generation.__enter__()
    clock.now += 10
    with phases("generation"), phases("reward"):
        clock.now += 5
        phases.note("aside", clock.now - 12)
    assert phases.timeline({}) == [
        phase("save", -5, -1),
        phase("generation", 0, 15),
        phase("aside", 3, 15),
        phase("reward", 10, 15),
    ]
    phases.lap()
    assert set(phases.since) == {"generation"} and phases.since["generation"] == 1005.0, "for who looks meanwhile"
    clock.now += 2
    generation.__exit__(None, None, None)
    clock.now += 3
    phases.note("aside", clock.now - 100)
    assert phases.timeline({}) == [phase("generation", 0, 2), phase("aside", 0, 5)]
    assert phases.timeline({}) == []


def test_a_phase_in_many_pieces_is_told_in_few(clock: Clock) -> None:
    phases = PhaseClock()
    for number in range(5000):
        clock.now += 20.0 if number == 2500 else 0.01
        with phases("reward"):
            clock.now += 0.01
    found = phases.timeline({})
    assert found == [phase("reward", pytest.approx(0.01), pytest.approx(50.0)), *found[1:]] and len(found) == 2
    assert found[1].began == pytest.approx(70.0) and 20.0 > 120 / FINEST > 0.01


def test_levels_of_the_pools_are_means_over_parts_of_the_time(clock: Clock) -> None:
    phases, engine, idle = PhaseClock(), Course(clock), Course(clock)
    clock.now += PARTS / 4
    engine.add(8)
    clock.now += PARTS / 4 + 0.5
    engine.add(-6)
    clock.now += 1.0
    engine.add(-2)
    clock.now += PARTS / 2 - 1.5
    found = phases.timeline({"engine 0": engine, "engine 1": idle})
    assert {span.lane for span in found} == {"engine 0"} and len(found) == PARTS / 4 + 2
    ends = [phase("engine 0", at, at + 1, pytest.approx(level)) for at, level in ((15, 8), (30, 5), (31, 1))]
    assert [found[0], *found[-2:]] == ends
    engine.add(3)
    clock.now += PARTS
    assert [span.level for span in phases.timeline({"engine 0": engine})] == [pytest.approx(3)] * PARTS


def test_a_course_of_many_changes_is_bounded_and_keeps_its_area(clock: Clock) -> None:
    changes, course, area = random.Random(0), Course(clock), 0.0
    for _ in range(10 * MAX_POINTS):
        course.set(changes.randrange(100))
        seconds = changes.random()
        area += course.value * seconds
        clock.now += seconds
        assert len(course._points) <= MAX_POINTS
    found = course.lap(1000.0, clock.now, PARTS)
    assert sum((ended - began) * level for began, ended, level in found) == pytest.approx(area)
    assert all(40 < level < 60 for *_, level in found) and len(found) == PARTS
    clock.now += 1.0
    assert [level for *_, level in course.lap(clock.now - 2.0, clock.now, 2)] == [pytest.approx(course.value)]
