"""A real vLLM engine that sleeps: what it frees, and that a weight sync makes it whole."""

import os

import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from dapo.tiny.random_model import make_random_model
from tests.support.engines.two import make_config, started
from tests.support.local_actors import local_sync
from tests.workers.test_rollout import change, group_of, largest_difference
from workers.engines.keeper import DEEPEST, LIGHTEST

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]

# Weights of 42 MB, and 16 KiB of cache for each token. An engine takes 5 to 9 MB more in some of its first ten cycles,
# in the 30 after them 13 MB together: its allocator keeps them. So the growth of all cycles counts, no single one's.
CYCLES, WARM_UP = 5, 4
SIZES = {"layers": 4, "hidden": 512, "heads": 8, "key_value_heads": 8, "intermediate": 1024}
LEAK = 1 / 6  # of the weights, in each cycle; the cache of the responses is more


@pytest.fixture(scope="module")
def engine(ray_cluster, tmp_path_factory, loop):
    """(pool of one engine, the same model in transformers), with a head of its own."""
    path = str(make_random_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False, **SIZES))
    with started(loop, make_config(path, 1)) as pool:
        yield pool, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def resident(pool) -> int:
    """Bytes of the engine's processes."""
    actor = ray.get(pool.workers[0].__ray_call__.remote(lambda worker: os.getpid()), timeout=60)
    return sum(each.memory_info().rss for each in psutil.Process(actor).children(recursive=True))


def answers(loop, pool, seed: int):
    return loop.run(group_of(pool, f"g{seed}", seed, 16, 48))


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
        assert largest_difference(model, found) <= 1e-4
        assert {span.version for response in found for span in response.policy_versions} == {version}
        awake.append(resident(pool))
    kib = [[each >> 10 for each in series] for series in (awake, freed)]
    print(f"level {level}: KiB awake {kib[0]}, freed {kib[1]}, weights {weights >> 10}")
    assert pool.keeper.level_proven
    assert min(freed) > LEAK * weights, "what the last answers had taken, at least"
    assert awake[-1] - awake[WARM_UP - 1] < CYCLES * LEAK * weights, "what a cycle strands, each next one does"
