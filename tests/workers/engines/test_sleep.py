"""A real vLLM engine that sleeps: what it frees, what it forgets, and that a weight sync makes it whole."""

import asyncio
import os

import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from dapo.tiny.random_model import make_random_model
from tests.support.engines.two import make_config
from tests.support.local_actors import local_sync
from tests.workers.test_rollout import change, group_of, largest_difference
from workers.engines.keeper import DEEPEST, LIGHTEST
from workers.remote import RemoteError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]

# Weights of 42 MB, and 16 KiB of cache for each token. An engine takes 5 to 9 MB more in some of its first ten cycles,
# in the 30 after them 13 MB together: its allocator keeps them. So the growth of all cycles counts, no single one's.
CYCLES, WARM_UP = 5, 4
SIZES = {"layers": 4, "hidden": 512, "heads": 8, "key_value_heads": 8, "intermediate": 1024}
RESPONSES, CAP = 16, 48
LEAK = 1 / 6  # of the weights, in each cycle; the cache of the responses is more
LIKE = 1e-4  # float32 on both sides; see workers/README.md


@pytest.fixture(scope="module")
def engine(ray_cluster, tmp_path_factory, loop):
    """(pool of one engine, the same model in transformers)."""
    from tests.support.engines.started import started

    path = str(make_random_model(tmp_path_factory.mktemp("model"), **SIZES))
    cfg = make_config(path, 1)
    with started(loop, cfg) as pool:
        yield pool, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def resident(pool) -> int:
    """Bytes of the engine's processes."""
    actor = ray.get(pool.workers[0].__ray_call__.remote(lambda worker: os.getpid()), timeout=60)
    return sum(each.memory_info().rss for each in psutil.Process(actor).children(recursive=True))


def wake_without_weights(worker):
    """Runs in the engine's actor, beside its loop: what a wake would be without the sync between its halves."""

    async def wake():
        await worker._engine.wake_up()
        worker._asleep = False

    asyncio.run_coroutine_threadsafe(wake(), worker._engine.output_handler.get_loop()).result(60)


def count_sleeps(worker):
    """Runs in the engine's actor: counts how often vLLM is told to sleep."""
    worker.sleeps, sleep = 0, worker._engine.sleep

    async def counted(level):
        worker.sleeps += 1
        await sleep(level)

    worker._engine.sleep = counted


def answers(loop, pool, seed: int):
    return loop.run(group_of(pool, f"g{seed}", seed, RESPONSES, CAP))


@pytest.mark.parametrize("level", [DEEPEST, LIGHTEST])
def test_cycles_free_the_memory_and_leave_nothing_stale(engine, loop, level):
    """The weights change each time: one that is not replaced would show in the log-probabilities."""
    pool, model = engine
    pool.keeper.level = level
    weights = sum(parameter.nbytes for parameter in model.parameters())
    sync = local_sync(pool, model, "broadcast", 16 << 20)
    generator = torch.Generator().manual_seed(level)
    loop.run(sync(1))
    answers(loop, pool, 10)  # the cache is touched
    awake, freed = [], []
    for version in range(2, 2 + WARM_UP + CYCLES):
        full = resident(pool)
        loop.run(sync.rest())
        assert not pool.serving and not pool.awake
        freed.append(full - resident(pool))
        for parameter in model.parameters():
            change(parameter, generator, 0.01, 0.0)
        loop.run(sync(version))
        found = answers(loop, pool, 100 * version)
        assert largest_difference(model, found) <= LIKE
        assert {span.version for response in found for span in response.policy_versions} == {version}
        awake.append(resident(pool))
    kib = [[each >> 10 for each in series] for series in (awake, freed)]
    print(f"level {level}: KiB awake {kib[0]}, freed {kib[1]}, weights {weights >> 10}")
    assert pool.keeper.level_proven
    assert min(freed) > LEAK * weights, "what the last answers had taken, at least"
    assert awake[-1] - awake[WARM_UP - 1] < CYCLES * LEAK * weights, "what a cycle strands, each next one does"


def test_an_engine_that_sleeps_deep_has_no_weights_left(engine, loop):
    """Or the test above would pass with an engine that only says that it sleeps."""
    pool, model = engine
    pool.keeper.level = DEEPEST
    sync = local_sync(pool, model, "broadcast", 16 << 20)
    loop.run(sync(30))
    whole = answers(loop, pool, 7)
    loop.run(sync.rest())
    ray.get(pool.workers[0].__ray_call__.remote(wake_without_weights), timeout=60)
    pool.admit((0,))
    hollow = answers(loop, pool, 7)
    assert [a.token_ids.tolist() for a in whole] != [b.token_ids.tolist() for b in hollow]
    loop.run(sync(31))
    again = answers(loop, pool, 7)
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(whole, again, strict=True))


def test_an_engine_that_a_failed_sync_has_woken_by_half_sleeps_again(engine, loop):
    """New ranks would load their model beside its weights, which are awake for the sync."""
    pool, model = engine
    pool.keeper.level = DEEPEST
    loop.run(local_sync(pool, model, "broadcast", 16 << 20)(40))
    whole = answers(loop, pool, 8)
    ray.get(pool.workers[0].__ray_call__.remote(count_sleeps), timeout=60)
    sleeps = lambda: ray.get(pool.workers[0].__ray_call__.remote(lambda worker: worker.sleeps), timeout=60)  # noqa: E731

    def lost(index):
        if index == 1:
            raise RemoteError("the ranks are gone")

    failing = local_sync(pool, model, "broadcast", 16 << 20, before=lost)
    loop.run(failing.rest())
    with pytest.raises(RemoteError, match="the ranks are gone"):
        loop.run(failing(41))
    assert sleeps() == 1
    loop.run(failing.rest())
    assert sleeps() == 2
    loop.run(failing.rest())
    assert sleeps() == 2, "it is asleep"
    loop.run(local_sync(pool, model, "broadcast", 16 << 20)(42))
    again = answers(loop, pool, 8)
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(whole, again, strict=True))


def test_an_engine_with_requests_does_not_sleep(engine, loop):
    pool, _ = engine

    async def busy():
        some = asyncio.Event()
        running = asyncio.create_task(group_of(pool, "busy", 900, 64, 960, some.set))
        await asyncio.wait_for(some.wait(), 300)
        with pytest.raises(RemoteError, match="1 groups run on an engine that is to sleep"):
            await pool._slots[0].sleep(DEEPEST)
        return await running

    assert len(loop.run(busy())) == 64
