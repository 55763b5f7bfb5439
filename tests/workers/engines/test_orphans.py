"""The processes of an engine when its actor is killed: stand-ins for the actor, vLLM's engine process and a worker."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dapo.workers.engines.orphans import ACTOR, POLL_S
from dapo.workers.engines.worker import RolloutWorker

GONE_S = 20.0
WORKER = """
import os, time
{}
print(os.getppid(), os.getpid(), flush=True)
time.sleep(600)
"""
AS_VLLM = WORKER.format("import dapo.workers.engines.extension")
QUICK = WORKER.format(
    "from dapo.sandbox.kernel import die_with; from dapo.workers.engines.orphans import end_with_actor; "
    "die_with(os.getppid()); end_with_actor()"
)
START = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], *sys.argv[2:]])"
NAMED = f"import os; os.environ[{ACTOR!r}] = str(os.getpid()); {START}"


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param((NAMED, START, AS_VLLM), id="a worker below the engine", marks=pytest.mark.nightly),
        pytest.param((NAMED, QUICK), id="one process"),
    ],
)
def test_an_engine_ends_with_its_actor_and_not_before(programs: tuple[str, ...]) -> None:
    """Each program starts the next one; the last one says its parent's number and its own."""
    actor = subprocess.Popen([sys.executable, "-c", *programs], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in actor.stdout.readline().split()]
    try:
        assert (pids[0] == actor.pid) == (len(programs) == 2)
        time.sleep(1.5 * POLL_S)
        assert not any(map(gone, pids))
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


def test_the_actor_tells_the_processes_of_its_engine_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**given: object) -> None:
        raise ValueError("no engine today")

    monkeypatch.setenv(ACTOR, "")
    monkeypatch.setattr("vllm.engine.arg_utils.AsyncEngineArgs", refused)
    with pytest.raises(ValueError, match="no engine today"):
        asyncio.run(RolloutWorker().start("model", {}))
    assert os.environ[ACTOR] == str(os.getpid())
