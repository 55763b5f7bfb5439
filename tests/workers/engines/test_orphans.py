"""The processes of an engine when its actor is killed: stand-ins for the actor, vLLM's engine process and a worker; by
hand, a real engine of two workers."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from workers import vllm_surface
from workers.engines.orphans import ACTOR, POLL_S
from workers.engines.worker import RolloutWorker

GONE_S = 20.0
WORKER = """
import os, time
{}
print(os.getppid(), os.getpid(), flush=True)
time.sleep(600)
"""
AS_VLLM = WORKER.format("import workers.engines.extension")
QUICK = WORKER.format(
    "from dapo.sandbox.kernel import die_with; from workers.engines.orphans import end_with_actor; "
    "die_with(os.getppid()); end_with_actor()"
)
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
    actor, pids = started(NAMED, START, AS_VLLM) if between else started(NAMED, QUICK)
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
    actor, pids = started(NAMED, START, QUICK)
    try:
        time.sleep(3 * POLL_S)
        assert not any(map(gone, pids))
    finally:
        os.kill(pids[0], signal.SIGKILL)
        actor.wait(GONE_S)


def test_the_actor_tells_the_processes_of_its_engine_who_it_is(monkeypatch):
    def refused(**given) -> None:
        raise ValueError("no engine today")

    monkeypatch.setenv(ACTOR, "")
    for name in ("AsyncEngineArgs", "AsyncLLM", "WeightTransferConfig"):
        monkeypatch.setattr(vllm_surface, name, refused, raising=False)
    with pytest.raises(ValueError, match="no engine today"):
        asyncio.run(RolloutWorker().start("model", {}))
    assert os.environ[ACTOR] == str(os.getpid())


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_tensor_parallel_engine_whose_actor_is_killed_leaves_no_process_and_comes_back(ray_cluster, tmp_path):
    """Its workers would hold both GPUs, on which the one in its place is to start."""
    import ray
    import torch
    from transformers import AutoModelForCausalLM

    from dapo.tiny.random_model import make_random_model
    from tests.support.engines.two import make_config
    from tests.support.local_actors import local_sync
    from tests.workers.test_rollout import change, group_of, largest_difference
    from workers.engines.arguments import engine_args
    from workers.placement import Placement
    from workers.rollout import RolloutPool

    path, said = str(make_random_model(tmp_path / "model", layers=2)), list[str]()
    cfg = make_config(path, 1)
    cfg.rollout.vllm |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    cfg.rollout.timeout_s = 600
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        change(parameter, generator, 0.2, 0.05)

    def processes(pool) -> list[psutil.Process]:
        """The actor, vLLM's engine process and two workers at least."""
        actor = ray.get(pool.workers[0].__ray_call__.remote(lambda worker: os.getpid()), timeout=60)
        return [psutil.Process(actor), *psutil.Process(actor).children(recursive=True)]

    async def run() -> None:
        pool = RolloutPool(Placement(cfg, "cpu").rollout(), cfg.rollout, warn=said.append)
        try:
            await pool.start(path, engine_args(cfg, "cpu"))
            await local_sync(pool, model, "broadcast", 100_000)(3)
            before = processes(pool)
            assert len(before) >= 4, before
            whole = await group_of(pool, "whole", 10)
            running = asyncio.create_task(group_of(pool, "killed", 10))
            while not pool._slots[0].load:
                await asyncio.sleep(0.01)
            os.kill(before[0].pid, signal.SIGKILL)
            deadline = time.monotonic() + GONE_S
            while not all(gone(each.pid) for each in before):
                assert time.monotonic() < deadline, [each for each in before if not gone(each.pid)]
                await asyncio.sleep(0.1)
            again = await running
            assert largest_difference(model, again) <= 1e-4, "it got the weights before it served"
            assert [list(one.token_ids) for one in again] == [list(one.token_ids) for one in whole]
            assert {span.version for each in again for span in each.policy_versions} == {3}
            assert not {each.pid for each in processes(pool)} & {each.pid for each in before}
            assert "engine 0 serves again (restart 1)" in said, said
        finally:
            await pool.stop(3.0)

    asyncio.run(run())
