"""Processes are ended whatever they do, and none but those that were meant."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from dapo.workers.training.processes import RankProcess, _own_space, _start_of, end_here


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def of(process: subprocess.Popen[bytes], started: str | None = None) -> RankProcess:
    return RankProcess("here", "node", _own_space(), process.pid, started or _start_of(process.pid))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_is_gone_also_if_it_was_stopped(child: subprocess.Popen[bytes], stopped: bool) -> None:
    if stopped:
        child.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert end_here([of(child)], 10) == []
    assert time.monotonic() - began < 5
    assert not psutil.pid_exists(child.pid) or psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert _start_of(child.pid) == "", "a zombie, which nobody has waited for, has ended"


def test_another_process_is_left_alone_and_what_does_not_end_is_named(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert end_here([of(child, started="1")], 3) == [], "its id is that of one that ended"
    assert child.poll() is None
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    assert end_here([of(child)], 0.5) == [child.pid]
