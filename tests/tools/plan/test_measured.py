"""The planner against what two real gloo ranks hold and write, for the tiny model.

Its engine half is compared with real engines in tests/workers/test_rollout.py, which has some running.
"""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dapo.driver.run import make_paths_absolute
from dapo.tools.plan.__main__ import configuration, known_shape
from dapo.tools.plan.actor import ActorMemory
from dapo.types import TrainSequence
from dapo.workers.actor import RankWork
from tests.support.training.plain_reference import on_all, start_pool, version_of

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1500)]

WITHIN = 0.15
LENGTH, PROMPT = 64, 4


@pytest.fixture(scope="module")
def tiny():
    """(configuration, shape) of dapo_tiny."""
    cfg = configuration(["+experiment=dapo_tiny", "weight_sync.max_mean_logprob_diff=100"])
    shape = known_shape(cfg)
    make_paths_absolute(cfg)
    return cfg, shape


@pytest.fixture(scope="module")
def actors(ray_cluster, tiny):
    return start_pool(tiny[0])


def full_micro_batches(tokens: int) -> RankWork:
    """One optimizer step over two micro-batches that are full to the last token."""
    rng = np.random.default_rng(0)
    response = LENGTH - PROMPT
    sequences = tuple(
        TrainSequence(
            token_ids=rng.integers(2, 200, LENGTH).astype(np.int32),
            num_prompt_tokens=PROMPT,
            rollout_logprobs=np.full(response, -3, np.float32),
            advantage=1.0,
            token_weight=1e-5,
            staleness=np.zeros(response, np.int32),
        )
        for _ in range(tokens // LENGTH)
    )
    return RankWork(version=0, minibatches=((sequences, sequences),), order=(0,))


def measure(worker, work):
    """Runs on a rank: (bytes of the parameters, of the optimizer's moments, of everything that an update adds)."""
    from torch.profiler import ProfilerActivity, profile

    worker.update(work)  # threads' scratch memory
    parameters = sum(p.to_local().nbytes for p in worker._policy.parameters())
    moments = [v for state in worker._optimizer.state.values() for v in state.values() if v.dim()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        worker.update(replace(work, version=work.version + 1))
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return parameters, sum(v.to_local().nbytes for v in moments), int(alive.max())


def test_actor_memory(tiny, actors):
    """Bytes of tensors; in an update those of every allocation, at the peak, gradients included."""
    cfg, shape = tiny
    memory = ActorMemory(cfg, shape)
    parameters, gradients, optimizer = (term.amount for term in memory.state())
    growth = memory.peak().total - parameters - optimizer - cfg.plan.overhead_bytes
    work = full_micro_batches(cfg.actor.max_tokens_per_gpu)
    for found in on_all(actors, measure, [work] * cfg.actor.num_workers):
        assert found == pytest.approx((parameters, optimizer, growth), rel=WITHIN)
    assert gradients < 0.05 * growth


def test_checkpoint_size(tiny, actors, tmp_path):
    cfg, shape = tiny
    state, export = ActorMemory(cfg, shape).checkpoint()
    [version] = set(on_all(actors, version_of))
    for term, write in ((state, partial(actors.save, version=version)), (export, actors.export_hf)):
        folder = tmp_path / term.name.split()[0]
        asyncio.run(write(str(folder)))
        found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        assert found == pytest.approx(term.amount, rel=WITHIN)
