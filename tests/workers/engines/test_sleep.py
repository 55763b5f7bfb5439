"""A real vLLM engine that sleeps: a weight sync makes it whole. Memory: tests/gpu/test_weight_sync.py."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo.tiny.random_model import make_random_model
from dapo.workers.engines.keeper import DEEPEST, LIGHTEST
from tests.support.engines.two import make_config, started
from tests.support.local_actors import local_sync
from tests.workers.test_rollout import change, group_of, largest_difference

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]

CYCLES = 3


@pytest.fixture(scope="module")
def engine(ray_cluster, tmp_path_factory, loop):
    """(pool of one engine, the same model in transformers), with a head of its own."""
    path = str(make_random_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False))
    with started(loop, make_config(path, 1)) as pool:
        yield pool, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def answers(loop, pool, seed: int):
    return loop.run(group_of(pool, f"g{seed}", seed, 16, 48))


@pytest.mark.parametrize("level", [DEEPEST, LIGHTEST])
def test_cycles_leave_nothing_stale(engine, loop, level):
    """The weights change each time: one that is not replaced would show in the log-probabilities."""
    pool, model = engine
    pool.keeper.level = level
    sync = local_sync(pool, model, "broadcast", 16 << 20)
    generator = torch.Generator().manual_seed(level)
    loop.run(sync(1))
    answers(loop, pool, 10)  # the cache is touched
    for version in range(2, 2 + CYCLES):
        loop.run(sync.rest())
        assert not pool.serving and not pool.awake
        for parameter in model.parameters():
            change(parameter, generator, 0.01, 0.0)
        loop.run(sync(version))
        found = answers(loop, pool, 100 * version)
        assert largest_difference(model, found) <= 1e-4
        assert {span.version for response in found for span in response.policy_versions} == {version}
    assert pool.keeper.level_proven
