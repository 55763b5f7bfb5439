"""Fault points: inert unless asked, at the passing that was named, once where that was asked, with real signals."""

import pytest

from dapo.ground import fault_points as faults
from dapo.ground.fault_points import ONCE, VARIABLE, fault_environment, fault_point


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> None:
    """Counts begin anew, as in a new process."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(ONCE, raising=False)
    faults._passed.clear()


def passings(point: str, count: int) -> list[str]:
    return [fault_point(point) for _ in range(count)]


def test_a_point_is_broken_at_the_passing_that_was_named_and_no_other_point(monkeypatch):
    assert passings("a.b", 3) == [""] * 3 and fault_environment() == {}
    monkeypatch.setenv(VARIABLE, "a.b:wrong@3,c:odd@1,a.b:late@5")
    assert passings("a.b", 6) == ["", "", "wrong", "", "late", ""], "none was counted before"
    assert passings("c", 2) == ["odd", ""]
    assert passings("a", 3) == [""] * 3 and passings("a.b.c", 3) == [""] * 3
    monkeypatch.setenv(VARIABLE, "a:wrong@*")
    assert passings("a", 2) == ["wrong"] * 2


def test_with_a_directory_the_first_process_alone_is_broken(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "a:wrong@2,b:wrong@2")
    assert fault_environment() == {VARIABLE: "a:wrong@2,b:wrong@2"}
    monkeypatch.setenv(ONCE, str(tmp_path))
    assert fault_environment() == {VARIABLE: "a:wrong@2,b:wrong@2", ONCE: str(tmp_path)}
    assert passings("a", 3) == ["", "wrong", ""]
    faults._passed.clear()  # another process
    assert passings("a", 3) == [""] * 3
    assert passings("b", 3) == ["", "wrong", ""], "each fault on its own"
