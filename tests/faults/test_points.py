"""Fault points: inert unless asked, at the passing that was named, once where that was asked, with real signals."""

import errno
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo.faults import points as faults
from dapo.faults.points import ONCE, VARIABLE, fault_environment, fault_point

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> None:
    """Counts begin anew, as in a new process."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(ONCE, raising=False)
    faults._passed.clear()


def passings(point: str, count: int) -> list[str]:
    return [fault_point(point) for _ in range(count)]


def test_nothing_happens_and_nothing_is_counted_unless_asked(monkeypatch):
    assert passings("driver.saved", 3) == [""] * 3 and fault_environment() == {}
    monkeypatch.setenv(VARIABLE, "")
    assert passings("driver.saved", 3) == [""] * 3
    monkeypatch.setenv(VARIABLE, "driver.saved:other@1")
    assert passings("driver.saved", 2) == ["other", ""]


def test_a_point_is_broken_at_the_passing_that_was_named_and_no_other_point(monkeypatch):
    monkeypatch.setenv(VARIABLE, "a.b:wrong@3,c:odd@1,a.b:late@5")
    assert passings("a.b", 6) == ["", "", "wrong", "", "late", ""]
    assert passings("c", 2) == ["odd", ""]
    assert passings("a", 3) == [""] * 3 and passings("a.b.c", 3) == [""] * 3


def test_with_a_directory_the_first_process_alone_is_broken(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "a:wrong@2,b:wrong@2")
    monkeypatch.setenv(ONCE, str(tmp_path))
    assert passings("a", 3) == ["", "wrong", ""]
    faults._passed.clear()  # another process
    assert passings("a", 3) == [""] * 3
    assert passings("b", 3) == ["", "wrong", ""], "each fault on its own"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a:wrong@2", "b:wrong@2"]


def test_failures_name_the_variable_and_the_point(monkeypatch):
    monkeypatch.setenv(VARIABLE, "rank.update:raise@1,driver.save:full@1")
    with pytest.raises(RuntimeError, match=f"{VARIABLE} asked for this failure at rank.update"):
        fault_point("rank.update")
    with pytest.raises(OSError, match="driver.save") as full:
        fault_point("driver.save")
    assert full.value.errno == errno.ENOSPC


def test_workers_get_what_the_driver_was_given(monkeypatch):
    monkeypatch.setenv(VARIABLE, "a:kill@1")
    assert fault_environment() == {VARIABLE: "a:kill@1"}
    monkeypatch.setenv(ONCE, "/somewhere")
    assert fault_environment() == {VARIABLE: "a:kill@1", ONCE: "/somewhere"}


PASSES = """
from dapo.faults.points import fault_point
for number in range(1, 4):
    print(number, flush=True)
    fault_point("here")
print("end", flush=True)
"""


def child(action: str) -> subprocess.Popen[str]:
    environment = {VARIABLE: f"here:{action}@2", "PATH": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", PASSES], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


def test_kill_leaves_the_process_no_time():
    process = child("kill")
    assert process.communicate(timeout=60)[0].split() == ["1", "2"]
    assert process.returncode == -signal.SIGKILL


def test_stop_freezes_the_process_until_it_is_continued():
    process = child("stop")
    assert process.stdout is not None
    try:
        assert [process.stdout.readline().strip() for _ in range(2)] == ["1", "2"]
        state = ""
        while state not in ("T", "t"):  # the deadline is the test's
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert process.poll() is None, "it ran on"
            time.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0].split() == ["3", "end"] and process.returncode == 0
    finally:
        process.kill()


def test_term_is_a_signal_that_the_process_may_catch():
    process = child("term")
    assert process.communicate(timeout=60)[0].split() == ["1", "2"] and process.returncode == -signal.SIGTERM


def test_all_points_are_listed():
    sources = [path.read_text() for folder in ("dapo", "workers") for path in (ROOT / folder).rglob("*.py")]
    points = {name for source in sources for name in re.findall(r'fault_point\("([^"]+)"\)', source)}
    listed = re.findall(r"^\| `(\w+\.\w+)` \|", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    assert sorted(points) == sorted(listed) and len(points) > 10
