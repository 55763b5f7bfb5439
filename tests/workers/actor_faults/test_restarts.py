"""Ranks that are lost: what `restart` brings back, and the sure end of their processes."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from dapo.pools import ActorsLost
from dapo.types import TrainBatch, TrainSequence
from dapo.workers.actor import ActorPool
from dapo.workers.remote import RemoteError
from dapo.workers.training import processes
from dapo.workers.training.files.state import own_tensors
from dapo.workers.training.processes import own_process
from tests.support.nodes import Node
from tests.support.training.plain_reference import (
    RANK,
    checksum,
    make_config,
    on_all,
    stale,
    start_own_pool,
    train_batch,
    version_of,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

TIMEOUT_S = 6.0  # of an update and of every collective, where a rank keeps silent


def killed(pool: ActorPool, good: TrainBatch) -> None:
    os.kill(pool._ranks._processes[1].pid, signal.SIGKILL)
    asyncio.run(pool.update(good))


def stuck(pool: ActorPool, good: TrainBatch) -> None:
    """Rank 0 waits in a collective for rank 1, which does not come."""
    pool._ranks.workers[1].__ray_call__.remote(lambda worker: time.sleep(600))
    asyncio.run(pool.update(good))


def half_done(pool: ActorPool, good: TrainBatch) -> None:
    """All ranks raise the same, behind the first of two optimizer steps."""
    on_all(pool, fail_in_the_second_step)
    minibatches = good.minibatches * 2
    asyncio.run(pool.update(dataclasses.replace(good, minibatches=minibatches, order=(0, 1))))


def fail_in_the_second_step(worker: Any) -> None:
    """Runs on a rank."""
    step, steps = worker._optimizer.step, []

    def failing() -> None:
        steps.append(None)
        if len(steps) == 2:
            raise RuntimeError("the machine is faulty")
        step()

    worker._optimizer.step = failing


def stopped_while_idle(pool: ActorPool, good: TrainBatch) -> None:
    os.kill(pool._ranks._processes[1].pid, signal.SIGSTOP)
    raise ActorsLost(asyncio.run(pool.until_lost()))


WAITED = r"waited 6 s for actor rank 1 "
FAULTS = [
    pytest.param(killed, "actor rank 1 .*: ActorDiedError", id="killed", marks=pytest.mark.nightly),
    pytest.param(stuck, WAITED + r"\(the update from policy version 1\)", id="stuck", marks=pytest.mark.nightly),
    pytest.param(half_done, "RuntimeError: the machine is faulty", id="half_done", marks=pytest.mark.nightly),
    pytest.param(
        stopped_while_idle, WAITED + r"\(a sign of life\)", id="stopped_while_idle", marks=pytest.mark.nightly
    ),
]


@pytest.fixture(scope="module")
def own(ray_cluster: None, model_dir: Path) -> Iterator[ActorPool]:
    """Ranks that are restarted again and again."""
    cfg: Config = make_config(model_dir, num_workers=2, timeout_s=TIMEOUT_S)
    pool = start_own_pool(cfg)
    yield pool
    pool.close()


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_after_a_restart_a_run_goes_on_from_its_checkpoint_bit_for_bit(
    own: ActorPool,
    sequences: tuple[TrainSequence, ...],
    tmp_path: Path,
    fault: Callable[[ActorPool, TrainBatch], None],
    message: str,
) -> None:
    asyncio.run(own.restart())
    untrained = checksum(own)
    asyncio.run(own.update(train_batch(0, sequences)))
    asyncio.run(own.save(str(tmp_path / "state"), 1))
    saved = checksum(own)
    good = train_batch(1, stale(sequences))
    asyncio.run(own.update(good))
    wanted = checksum(own)
    asyncio.run(own.load(str(tmp_path / "state"), 1))

    before = list(own._ranks._processes)
    began = time.monotonic()
    with pytest.raises(ActorsLost, match=message):
        fault(own, good)
    noticed = time.monotonic() - began
    for attempt in (own.update(good), own.save(str(tmp_path / "lost"), 1), own.export_hf(str(tmp_path / "lost"))):
        with pytest.raises(ActorsLost, match="lost before: .*" + message):
            asyncio.run(attempt)
    assert not (tmp_path / "lost").exists()

    asyncio.run(own.restart())
    assert noticed < 30
    assert not [process for process in before if psutil.pid_exists(process.pid)]
    assert checksum(own) == untrained and on_all(own, version_of) == [0, 0]
    asyncio.run(own.load(str(tmp_path / "state"), 1))
    assert checksum(own) == saved
    asyncio.run(own.update(good))
    assert checksum(own) == wanted


@pytest.mark.nightly
def test_lost_ranks_go_on_from_the_memory_of_their_nodes_and_take_no_damaged_copy(
    model_dir: Path, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    """Two copies of the parameters side by side: rank 3 has the state of rank 1."""
    pool = start_own_pool(make_config(model_dir, num_workers=4, fsdp_size=2))
    good = train_batch(1, stale(sequences))
    try:
        asyncio.run(pool.update(train_batch(0, sequences)))
        kept, saved = asyncio.run(pool.keep(1)), checksum(pool)
        asyncio.run(pool.save(str(tmp_path / "state"), 1))
        asyncio.run(pool.update(good))
        wanted = checksum(pool)
        with pytest.raises(RemoteError, match="a copy of policy version 1: they are at version 2"):
            asyncio.run(pool.keep(1))
        os.kill(pool._ranks._processes[1].pid, signal.SIGKILL)
        with pytest.raises(ActorsLost):
            asyncio.run(pool.update(train_batch(2, stale(sequences))))
        asyncio.run(pool.restart())

        def goes_on(source: str) -> None:
            assert asyncio.run(pool.restore(kept)) == source
            assert checksum(pool) == saved and on_all(pool, version_of) == [1] * 4
            asyncio.run(pool.update(good))
            assert checksum(pool) == wanted

        goes_on("own copies")
        (digests, copied), twin = kept.sources[1]
        changed = [data.copy() for data in ray.get(copied)]
        changed[-1][0] ^= 1  # of a moment
        kept.sources[1][:] = [(digests, ray.put(changed)), (digests, ray.put(changed[1:])), twin]
        goes_on("ranks 1 from other copies than their own")
        kept.sources[1].remove(twin)
        with pytest.raises(RemoteError, match="actor rank 1: RuntimeError: none of 2 copies of its state is whole"):
            asyncio.run(pool.restore(kept))
        with pytest.raises(RemoteError, match="of no policy version; load a checkpoint"):
            asyncio.run(pool.update(good))
        asyncio.run(pool.load(str(tmp_path / "state"), 1))
        asyncio.run(pool.update(good))
        assert checksum(pool) == wanted
    finally:
        pool.close()


def changed(worker: Any) -> None:
    """Runs on a rank: a state that no start makes."""
    for tensor in own_tensors(worker._policy, worker._optimizer):
        tensor += 1


@pytest.mark.nightly
def test_a_rank_that_lost_its_node_takes_its_state_from_the_other_one(ray_cluster: None) -> None:
    """The tiny experiment's model: Ray keeps answers of less than 100 KB in the driver."""
    nodes = [Node(gpus=0) for _ in range(3)]
    cfg = make_config(Path(resolve_path("pkg://dapo.tiny/base")), num_workers=2)
    cfg.checkpoint.memory_copies = 2
    there = [NodeAffinitySchedulingStrategy(node_id=node.id, soft=False) for node in nodes]
    pool = ActorPool(cfg, "cpu", lambda: [RANK | {"scheduling_strategy": where} for where in there[:2]])
    try:
        asyncio.run(pool.start())
        untrained = checksum(pool)
        on_all(pool, changed)
        kept, wanted = asyncio.run(pool.keep(0)), checksum(pool)
        nodes[1].kill()
        with pytest.raises(ActorsLost):
            asyncio.run(pool.keep(0))
        there.pop(1)
        asyncio.run(pool.restart())
        assert checksum(pool) == untrained != wanted
        kept.sources[1].pop(0)  # which Ray may have on the first node too
        asyncio.run(pool.restore(kept))
        assert checksum(pool) == wanted
    finally:
        pool.close()
        for node in nodes:
            node.stop()


def test_a_process_that_the_driver_does_not_see_is_ended_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node is this one; the driver believes otherwise."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        here = own_process()
        monkeypatch.setattr(processes, "_own_space", lambda: "of another container")
        there = dataclasses.replace(here, pid=child.pid, started=processes._start_of(child.pid))
        asyncio.run(processes.end_all([there], 20.0, "key"))
        assert child.poll() == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_a_node_that_is_gone_took_its_processes_along_and_one_that_outlives_its_end_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = own_process()
    began = time.monotonic()
    gone = dataclasses.replace(here, node="f" * 56, space="of another machine")
    asyncio.run(processes.end_all([gone], 20.0, "key"))
    assert time.monotonic() - began < 20
    monkeypatch.setattr(processes, "end_here", lambda those, timeout_s: [each.pid for each in those])
    with pytest.raises(RemoteError, match=rf"process {here.pid} on {here.host} did not end within 1 s .* \(`key`\)"):
        asyncio.run(processes.end_all([here], 1.0, "key"))
