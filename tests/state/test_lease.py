"""One run per directory, also between hosts: a live owner is seen, a dead one is not waited for for ever."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.state import lease
from dapo.state.lease import Lease, LeaseHeld, LeaseLost
from tests.support.state.claims import claim, save


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT_S": 0.1, "STALE_S": 2.0, "POLL_S": 0.05}.items():
        monkeypatch.setattr(lease, name, seconds)


@pytest.fixture
def nobody_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "STALE_S", 0.6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lease"


def written_by(path: Path, *, host: str = "", boot: str = "", pid: int = 0, **more: str) -> None:
    """The lease of another process; by default of one on this host that is dead."""
    if not pid:
        ended = subprocess.Popen(["true"])
        ended.wait(timeout=60)
        pid = ended.pid
    about = {"host": host or socket.gethostname(), "boot": boot or lease._boot(), "pid": str(pid)}
    path.write_text(json.dumps(about | {"token": "theirs", "since": "yesterday"} | more))


@pytest.fixture
def touched(path: Path) -> Iterator[None]:
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


def taken(path: Path) -> Lease:
    held = Lease(path)
    held.take()
    return held


def waited(path: Path) -> bool:
    """Takes the lease, and whether that took the time after which an owner is dead."""
    began = time.monotonic()
    taken(path).release()
    return time.monotonic() - began >= lease.STALE_S


def no_watch(self: Lease, owner: dict[str, str]) -> None:
    raise AssertionError(f"waits for {owner}")


def test_it_says_who_holds_it_is_touched_and_goes_with_its_owner(path):
    held = taken(path)
    about, first = json.loads(path.read_text()), path.stat().st_mtime_ns
    assert (about["host"], about["pid"]) == (socket.gethostname(), str(os.getpid()))
    assert len(about["token"]) == 32 and about["since"][:2] == "20"
    held.check()
    deadline = time.monotonic() + 30
    while path.stat().st_mtime_ns == first:
        assert time.monotonic() < deadline, "no beat"
        time.sleep(0.05)
    held.release()
    assert list(path.parent.iterdir()) == [] and not held._thread.is_alive()
    held.release()


def test_a_dead_owner_on_this_host_is_not_waited_for(path, monkeypatch, nobody_beats):
    written_by(path, pid=os.getppid())
    assert waited(path), "it lives"
    monkeypatch.setattr(Lease, "_watch", no_watch)
    written_by(path)
    taken(path).release()


def test_a_live_run_keeps_a_directory_whose_lock_was_removed(tmp_path):
    run = claim(tmp_path)
    (tmp_path / ".lock").unlink()
    with pytest.raises(ValueError, match=f"in use by a live run .process {os.getpid()} on "):
        claim(tmp_path)
    run.release()
    claim(tmp_path).release()


@pytest.mark.parametrize("where", [{"host": "elsewhere"}, {"boot": "before-the-restart"}])
def test_an_owner_elsewhere_is_waited_for_and_one_line_says_so(where, path, caplog, nobody_beats):
    written_by(path, **where)
    assert waited(path)
    [line] = caplog.messages
    owner = f"on {where.get('host', socket.gethostname())}, since yesterday holds {path.parent};"
    assert owner in line and "at most 1 s" in line and f"remove {path.name}" in line


def test_a_live_owner_elsewhere_is_seen_whatever_its_clock_says(path, touched):
    written_by(path, host="elsewhere", pid=7)
    with pytest.raises(LeaseHeld, match="process 7 on elsewhere, since yesterday"):
        taken(path)
    assert json.loads(path.read_text())["token"] == "theirs"


def test_a_live_owner_here_without_the_kernels_lock_is_seen(path):
    held = taken(path)
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()} on"):
        taken(path)
    held.check()
    held.release()
    assert list(path.parent.iterdir()) == []


def test_an_owner_that_lets_go_is_not_waited_for(path, monkeypatch):
    written_by(path, host="elsewhere")
    threading.Timer(0.3, path.unlink).start()
    monkeypatch.setattr(lease, "STALE_S", 60.0)
    assert not waited(path)


def test_who_was_taken_over_is_told_and_lets_go(path):
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


def test_a_check_sees_it_at_once(path, monkeypatch):
    """A process that was stopped for long must not commit a checkpoint before its next beat."""
    monkeypatch.setattr(lease, "BEAT_S", 3600.0)
    held = taken(path)
    path.unlink()
    held.check()
    assert json.loads(path.read_text())["token"] == held._token, "a file that somebody removed is written again"
    written_by(path, host="elsewhere")
    with pytest.raises(LeaseLost):
        held.check()
    held._ended.set()


def test_of_two_who_take_over_at_once_the_first_one_loses(path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_S", 3600.0)
    monkeypatch.setattr(Lease, "_watch", lambda self, owner: None)
    first, second = taken(path), taken(path)
    second.check()
    with pytest.raises(LeaseLost):
        first.check()
    for each in (first, second):
        each.release()


def test_a_disk_that_fails_ends_no_run(path, monkeypatch):
    held = taken(path)

    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "utime", failing)
    held.check()
    time.sleep(4 * lease.BEAT_S)
    assert held._thread.is_alive()
    held.release()


HOLDER = """
import os, sys
from dapo.state.run_dir import claim_output_dir
held = claim_output_dir(sys.argv[1], "auto", {})
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_process_that_died_is_free(tmp_path):
    pipe, command = subprocess.PIPE, [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"in use by a live run .process {holder.pid} on "):
            claim(tmp_path)
        holder.kill()
        holder.wait(timeout=30)
    claim(tmp_path).release()


@pytest.mark.parametrize("locks", ["of another kernel", "not supported"])
def test_a_run_is_seen_where_the_kernels_lock_does_not_reach(locks, tmp_path, monkeypatch):
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lease, "STALE_S", 30.0)
    if locks == "not supported":
        monkeypatch.setattr(fcntl, "flock", unsupported)
    run, host = claim(tmp_path), socket.gethostname()
    if locks == "of another kernel":
        run._lock.close()
        theirs = (tmp_path / ".lease").read_text().replace(f'"host": "{host}"', '"host": "elsewhere"')
        (tmp_path / ".lease").write_text(theirs)
        host = "elsewhere"
    with pytest.raises(ValueError, match=rf"is in use by a live run \(process \d+ on {host}, since .*wait for it"):
        claim(tmp_path)
    run.release()
    claim(tmp_path).release()


def test_a_run_that_was_taken_over_commits_nothing(tmp_path):
    run, told = claim(tmp_path), threading.Event()
    save(run, 1)
    run.when_lost(told.set)
    (tmp_path / ".lease").write_text('{"token": "theirs", "pid": "7", "host": "elsewhere", "since": "now"}')
    (run.checkpoints / "step_000002.theirs.tmp").mkdir()
    with pytest.raises(LeaseLost, match="was taken over by process 7 on elsewhere"):
        save(run, 2)
    assert told.wait(30)
    left = sorted(path.name for path in run.checkpoints.iterdir() if path.is_dir())
    assert left == ["step_000001", "step_000002.theirs.tmp"]
    run.release()
    assert (tmp_path / ".lease").exists(), "theirs"
