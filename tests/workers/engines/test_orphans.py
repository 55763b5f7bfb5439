"""The processes of an engine when its actor is killed: stand-ins for the actor, vLLM's engine process and a worker."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from workers.engines.orphans import ACTOR

GONE_S = 20.0
WORKER = """
import os, time
from dapo.sandbox.kernel import die_with
from workers.engines.orphans import end_with_actor
die_with(os.getppid())
end_with_actor()
print(os.getppid(), os.getpid(), flush=True)
time.sleep(600)
"""
START = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], *sys.argv[2:]])"
NAMED = f"import os; os.environ[{ACTOR!r}] = str(os.getpid()); {START}"


def started(*programs: str) -> tuple["subprocess.Popen[str]", list[int]]:
    """The first program, which starts the others one below the other, and what the last one says."""
    process = subprocess.Popen([sys.executable, "-c", *programs], stdout=subprocess.PIPE, text=True)
    return process, [int(word) for word in process.stdout.readline().split()]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("between", [True, False], ids=["several processes", "one"])
def test_an_engine_whose_actor_is_killed_ends(between):
    actor, pids = started(NAMED, *([START] if between else []), WORKER)
    try:
        assert (pids[0] == actor.pid) != between and not any(map(gone, pids))
        actor.kill()
        actor.wait(GONE_S)
        deadline = time.monotonic() + GONE_S
        while not all(map(gone, pids)):
            assert time.monotonic() < deadline, "it lives on, and holds its GPUs"
            time.sleep(0.1)
    finally:
        for pid in pids:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_an_engine_whose_actor_lives_is_left_alone():
    actor, pids = started(NAMED, START, WORKER)
    try:
        time.sleep(3.0)
        assert not any(map(gone, pids))
    finally:
        os.kill(pids[0], signal.SIGKILL)
        actor.wait(GONE_S)
