"""Ranks that fail in an update: which failures they outlive, and what is refused afterwards.

The ranks, their process groups and their deadlines are real. On one rank without Ray: training/test_update.
"""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dapo.pools import ActorsLost, BatchRefused
from dapo.types import TrainSequence
from dapo.workers.actor import ActorPool
from dapo.workers.remote import RemoteError, wait
from tests.support.training.plain_reference import checksum, on_all, start_pool, train_batch, version_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_an_update_that_the_driver_gave_up_on_is_not_saved_as_if_it_had_not_happened(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    async def give_up() -> None:
        async with asyncio.timeout(0.01):
            await pool.update(train_batch(0, *[sequences] * 8))

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    with pytest.raises(ActorsLost, match=r"cannot be used for saving .* the update from policy version 0 \(Cancelled"):
        asyncio.run(pool.save(str(tmp_path / "state"), 0))
    # Another driver's calls queue behind the update that is still running.
    refs = [worker.save.remote(str(tmp_path / "state"), 0) for worker in pool._ranks.workers]
    with pytest.raises(RemoteError, match="a checkpoint of policy version 0: they are at version 1"):
        asyncio.run(wait(refs, 600, "saving", "none"))
    assert on_all(pool, version_of) == [1, 1] and not (tmp_path / "state").exists()


def test_what_only_one_rank_has_met_is_refused_or_skipped_by_all_and_leaves_nothing_behind(
    pool: ActorPool, sequences: tuple[TrainSequence, ...]
) -> None:
    """Each batch after it is trained on as if it had never been."""
    good = train_batch(0, sequences)
    asyncio.run(pool.update(good))
    trained = checksum(pool)

    pool = start_pool(pool._cfg)
    shifted = tuple(dataclasses.replace(s, rollout_logprobs=s.rollout_logprobs + np.float32(0.2)) for s in sequences)
    with pytest.raises(BatchRefused, match=r"version 0: WeightParityError: .* is 0.2 over") as refused:
        asyncio.run(pool.update(train_batch(0, shifted, shifted)))
    assert refused.value.reason == "parity"
    bad = (dataclasses.replace(sequences[0], advantage=np.inf), *sequences[1:])
    with pytest.raises(BatchRefused, match=r"NonFiniteError: 3 optimizer steps in a row were skipped") as refused:
        asyncio.run(pool.update(train_batch(0, bad, bad, bad, sequences)))
    assert refused.value.reason == "nonfinite"
    asyncio.run(pool.update(good))
    assert checksum(pool) == trained

    pool = start_pool(pool._cfg)
    updated = asyncio.run(pool.update(train_batch(0, bad, sequences)))
    assert updated.skipped == (0,) and on_all(pool, version_of) == [1, 1]
    assert checksum(pool) == trained
