"""How often something may be started again."""

import pytest

from dapo.faults import restarts as module
from dapo.faults.restarts import HOUR_S, Restarts


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test sets."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    return clock


def test_restarts_that_worked_count_for_an_hour(now: list[float]) -> None:
    restarts = Restarts(2)
    for _ in range(2):
        assert not restarts.spent()
        restarts.add()
        restarts.worked()
    assert restarts.spent() and restarts.count() == 2
    now[0] = HOUR_S + 1
    assert not restarts.spent() and restarts.count() == 0


def test_restarts_that_fail_in_a_row_count_however_long_each_takes(now: list[float]) -> None:
    """A start may wait for a node that never comes."""
    restarts = Restarts(3)
    for _ in range(3):
        assert not restarts.spent()
        restarts.add()
        now[0] += 0.4 * HOUR_S
    assert restarts.spent() and restarts.count() == 3
    restarts.worked()
    assert not restarts.spent()


def test_none_may_be_allowed(now: list[float]) -> None:
    assert Restarts(0).spent()
