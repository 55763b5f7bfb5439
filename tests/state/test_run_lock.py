"""One run per directory: the kernel's lock, and the lease for other hosts."""

import fcntl
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dapo.state import lease
from dapo.state.lease import LeaseLost
from tests.support.state.claims import claim, save


def test_two_live_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    run = claim(tmp_path)
    with pytest.raises(ValueError, match=r"is in use by a live run \(process \d+ on .+\)"):
        claim(tmp_path)
    run.release()
    claim(tmp_path).release()


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    code = (
        "import os, sys; from dapo.state.run_dir import claim_output_dir; "
        "held = claim_output_dir(sys.argv[1], 'auto', {}); print('held', flush=True); sys.stdin.read(); os._exit(9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"in use by a live run .process {holder.pid} "):
            claim(tmp_path)
        holder.kill()
        holder.wait(timeout=30)
    claim(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT_S": 0.1, "STALE_S": 30.0, "POLL_S": 0.05, "SETTLE_S": 0.1}.items():
        monkeypatch.setattr(lease, name, seconds)


def test_a_run_on_another_host_is_seen_where_the_kernels_lock_does_not_reach(tmp_path: Path, quick: None) -> None:
    run = claim(tmp_path)
    run._lock.close()  # as another kernel sees it
    theirs = (tmp_path / ".lease").read_text().replace(f'"host": "{socket.gethostname()}"', '"host": "elsewhere"')
    (tmp_path / ".lease").write_text(theirs)
    with pytest.raises(ValueError, match=r"is in use by a live run \(process \d+ on elsewhere, since .*wait for it"):
        claim(tmp_path)
    run.release()
    claim(tmp_path).release()


def test_a_run_that_was_taken_over_commits_nothing(tmp_path: Path, quick: None) -> None:
    """And leaves alone what the other one is writing."""
    run, told = claim(tmp_path), threading.Event()
    save(run, 1)
    run.when_lost(told.set)
    (tmp_path / ".lease").write_text('{"token": "theirs", "pid": "7", "host": "elsewhere", "since": "now"}')
    (run.checkpoints / "step_000002.theirs.tmp").mkdir()
    with pytest.raises(LeaseLost, match="was taken over by process 7 on elsewhere"):
        save(run, 2)
    assert told.wait(30)
    with pytest.raises(LeaseLost):
        run.check()
    left = sorted(path.name for path in run.checkpoints.iterdir() if path.is_dir())
    assert left == ["step_000001", "step_000002.theirs.tmp"]
    run.release()
    assert (tmp_path / ".lease").exists(), "theirs"


def test_a_file_system_without_locks_leaves_the_lease(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    run = claim(tmp_path)
    with pytest.raises(ValueError, match="is in use by a live run"):
        claim(tmp_path)
    run.release()
    claim(tmp_path).release()
