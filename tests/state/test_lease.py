"""One run per directory, also between hosts: a live owner is seen, a dead one is not waited for for ever."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.state import lease
from dapo.state.lease import Lease, LeaseHeld, LeaseLost


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT_S": 0.1, "STALE_S": 2.0, "POLL_S": 0.05, "SETTLE_S": 0.1}.items():
        monkeypatch.setattr(lease, name, seconds)


@pytest.fixture
def nobody_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the time after which an owner is dead may be short."""
    monkeypatch.setattr(lease, "STALE_S", 0.6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lease"


def written_by(path: Path, *, host: str = "", boot: str = "", pid: int = 0) -> None:
    """The lease of another process; by default of one on this host that is dead."""
    about = {"host": host or socket.gethostname(), "boot": boot or lease._boot(), "pid": str(pid or dead_pid())}
    path.write_text(json.dumps(about | {"token": "theirs", "since": "yesterday"}))


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait(timeout=60)
    return process.pid


@pytest.fixture
def touched(path: Path) -> Iterator[None]:
    """A live owner elsewhere, whose clock is a day behind."""
    ended = threading.Event()

    def touch() -> None:
        beats = 0
        while not ended.wait(0.1):
            beats += 1
            if path.exists():
                os.utime(path, (beats, beats))

    thread = threading.Thread(target=touch)
    thread.start()
    yield
    ended.set()
    thread.join(timeout=30)


def taken(path: Path, *, locked: bool = True) -> Lease:
    held = Lease(path)
    held.take(locked=locked)
    return held


def waited(path: Path, *, locked: bool) -> bool:
    """Takes the lease, and whether that took the time after which an owner is dead."""
    began = time.monotonic()
    taken(path, locked=locked).release()
    return time.monotonic() - began >= lease.STALE_S


def no_watch(self: Lease, owner: dict[str, str]) -> None:
    raise AssertionError(f"waits for {owner}")


def test_it_says_who_holds_it_and_goes_with_its_owner(path: Path) -> None:
    held = taken(path)
    about = json.loads(path.read_text())
    assert (about["host"], about["pid"]) == (socket.gethostname(), str(os.getpid()))
    assert len(about["token"]) == 32 and about["since"][:2] == "20"
    held.check()
    held.release()
    assert list(path.parent.iterdir()) == []
    held.release()


def test_it_is_touched_while_it_is_held_and_not_after(path: Path) -> None:
    held = taken(path)
    first = path.stat().st_mtime_ns
    deadline = time.monotonic() + 30
    while path.stat().st_mtime_ns == first:
        assert time.monotonic() < deadline, "no beat"
        time.sleep(0.05)
    held.release()
    assert not held._thread.is_alive()


@pytest.mark.parametrize("locked", [True, False])
def test_a_dead_owner_on_this_host_is_not_waited_for(locked: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "_watch", no_watch)
    written_by(path)
    taken(path, locked=locked).release()


def test_with_the_kernels_lock_the_number_of_a_process_says_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, nobody_beats: None
) -> None:
    """It may be another process by now."""
    written_by(path, pid=os.getppid())
    assert waited(path, locked=False)
    written_by(path, pid=os.getppid())
    monkeypatch.setattr(Lease, "_watch", no_watch)
    taken(path, locked=True).release()


@pytest.mark.parametrize("where", [{"host": "elsewhere"}, {"boot": "before-the-restart"}])
def test_an_owner_elsewhere_is_waited_for_and_one_line_says_so(
    where: dict[str, str], path: Path, caplog: pytest.LogCaptureFixture, nobody_beats: None
) -> None:
    written_by(path, **where)
    assert waited(path, locked=True)
    [line] = caplog.messages
    owner = f"on {where.get('host', socket.gethostname())}, since yesterday holds {path.parent};"
    assert owner in line and "at most 1 s" in line and f"remove {path.name}" in line


@pytest.mark.parametrize("locked", [True, False])
def test_a_live_owner_elsewhere_is_seen_whatever_its_clock_says(locked: bool, path: Path, touched: None) -> None:
    written_by(path, host="elsewhere", pid=7)
    with pytest.raises(LeaseHeld, match="process 7 on elsewhere, since yesterday"):
        taken(path, locked=locked)
    assert json.loads(path.read_text())["token"] == "theirs"


def test_a_live_owner_here_without_the_kernels_lock_is_seen(path: Path) -> None:
    held = taken(path, locked=False)
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()} on"):
        taken(path, locked=False)
    held.check()
    held.release()


def test_an_owner_that_lets_go_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_by(path, host="elsewhere")
    timer = threading.Timer(0.3, path.unlink)
    timer.start()
    monkeypatch.setattr(lease, "STALE_S", 60.0)
    assert not waited(path, locked=True)


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}"])
def test_a_file_that_says_nothing_is_waited_for(content: str, path: Path, nobody_beats: None) -> None:
    path.write_text(content)
    assert waited(path, locked=True)


def test_who_was_taken_over_is_told_and_lets_go(path: Path) -> None:
    held, told = taken(path), threading.Event()
    held.when_lost(told.set)
    other = path.with_name("other")
    written_by(other, host="elsewhere", pid=7)
    other.replace(path)
    assert told.wait(30)
    with pytest.raises(LeaseLost, match="was taken over by process 7 on elsewhere, since yesterday"):
        held.check()
    late: list[bool] = []
    held.when_lost(lambda: late.append(True))
    assert late == [True]
    before = path.stat().st_mtime_ns
    held.release()
    assert json.loads(path.read_text())["token"] == "theirs" and path.stat().st_mtime_ns == before


def test_a_check_sees_it_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped for long must not commit a checkpoint before its next beat."""
    monkeypatch.setattr(lease, "BEAT_S", 3600.0)
    held = taken(path)
    held.check()
    written_by(path, host="elsewhere")
    with pytest.raises(LeaseLost):
        held.check()
    held._ended.set()


def test_two_who_take_over_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one to write has it, and the other sees that."""
    both_waited = threading.Barrier(2)
    monkeypatch.setattr(lease, "SETTLE_S", 1.0)
    monkeypatch.setattr(Lease, "_watch", lambda self, owner: both_waited.wait(30))
    written_by(path, host="elsewhere")
    outcomes: list[Lease | LeaseHeld] = []

    def take() -> None:
        try:
            outcomes.append(taken(path, locked=True))
        except LeaseHeld as error:
            outcomes.append(error)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    winners = [one for one in outcomes if isinstance(one, Lease)]
    assert len(outcomes) == 2 and len(winners) == 1
    winners[0].check()
    winners[0].release()


def test_a_file_that_somebody_removed_is_written_again(path: Path) -> None:
    held = taken(path)
    path.unlink()
    held.check()
    assert json.loads(path.read_text())["token"] == held._token
    held.release()


def test_a_disk_that_fails_ends_no_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = taken(path)

    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "utime", failing)
    held.check()
    time.sleep(4 * lease.BEAT_S)
    assert held._thread.is_alive()
    held.release()


def test_a_file_system_without_hard_links(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    held = taken(path, locked=False)
    with pytest.raises(LeaseHeld):
        taken(path, locked=False)
    held.release()
    assert list(path.parent.iterdir()) == []
