"""Ranks that fail in an update: which failures they outlive, and what is refused afterwards.

The ranks, their process groups and their deadlines are real.
"""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.pools import ActorsLost, BatchRefused
from dapo.types import TrainSequence
from tests.support.training.plain_reference import (
    LENGTHS,
    checksum,
    make_config,
    on_all,
    start_pool,
    train_batch,
    update,
    version_of,
)
from workers.actor import ActorPool
from workers.remote import RemoteError, wait

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def other(sequences: tuple[TrainSequence, ...], first: float = np.nan, **fields: Any) -> tuple[TrainSequence, ...]:
    """The first of them has other rollout log-probabilities, or whatever is given."""
    logprobs = np.full_like(sequences[0].rollout_logprobs, first)
    return (dataclasses.replace(sequences[0], **(fields or {"rollout_logprobs": logprobs})), *sequences[1:])


def test_ranks_refuse_what_is_for_another_version_and_go_on(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    before = checksum(pool)
    with pytest.raises(RemoteError, match=r"Refused: .* an update of policy version 1: they are at version 0"):
        asyncio.run(pool.update(train_batch(1, sequences)))
    with pytest.raises(RemoteError, match=r"Refused: .* a checkpoint of policy version 1: they are at version 0"):
        asyncio.run(pool.save(str(tmp_path / "one"), 1))
    assert checksum(pool) == before and not (tmp_path / "one").exists()
    asyncio.run(pool.update(train_batch(0, sequences)))
    with pytest.raises(RemoteError, match=r"a checkpoint of policy version 0: they are at version 1"):
        asyncio.run(pool.save(str(tmp_path / "none"), 0))
    asyncio.run(pool.save(str(tmp_path / "one"), 1))
    asyncio.run(pool.load(str(tmp_path / "one"), 1))
    with pytest.raises(RemoteError, match=r"an update of policy version 0: they are at version 1"):
        asyncio.run(pool.update(train_batch(0, sequences)))


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


@pytest.mark.parametrize("count", [1, 2], ids=["one_step", "two_steps"])
def test_a_refused_batch_leaves_nothing_behind(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], count: int
) -> None:
    """The batch after it is trained on as if the refused one had never been."""
    good = train_batch(0, sequences)
    shifted = tuple(dataclasses.replace(s, rollout_logprobs=s.rollout_logprobs + np.float32(0.2)) for s in sequences)
    with pytest.raises(BatchRefused, match=r"version 0: WeightParityError: .* is 0.2 over") as refused:
        asyncio.run(pool.update(train_batch(0, *[shifted] * count)))
    assert refused.value.reason == "parity"
    asyncio.run(pool.update(good))
    found = checksum(pool)
    fresh = start_pool(make_config(Path(pool._cfg.model.path), num_workers=2))
    asyncio.run(fresh.update(good))
    assert found == checksum(fresh)


def test_numbers_that_are_not_finite_skip_their_steps_and_are_named(
    pool: ActorPool, sequences: tuple[TrainSequence, ...]
) -> None:
    """Each mini-batch is one optimizer step; those that can be trained on are."""
    good = update(pool, train_batch(0, sequences))
    assert good["actor/skipped_steps"] == good["parity/non_finite_tokens"] == 0
    trained = checksum(pool)
    tokens = len(sequences[0].rollout_logprobs)
    for bad in (other(sequences), other(sequences, -np.inf), other(sequences, advantage=np.inf)):
        asyncio.run(start_pool(pool._cfg).update(train_batch(0, sequences)))
        again = start_pool(pool._cfg)
        updated = asyncio.run(again.update(train_batch(0, bad, sequences)))
        assert updated.skipped == (0,) and not updated.stop
        assert updated.metrics["actor/skipped_steps"] == updated.metrics["actor/optimizer_steps"] == 1
        assert updated.metrics["parity/non_finite_tokens"] == (0 if bad[0].advantage == np.inf else tokens)
        assert np.isfinite(updated.metrics["parity/mean_abs_logprob_diff"])
        assert on_all(again, version_of) == [1, 1], "an update of which a step was skipped counts"
        assert checksum(again) == trained


def spoil(worker: Any) -> None:
    """Runs on a rank: weights that make every log-probability NaN."""
    parameter = worker._policy.model.get_parameter("model.norm.weight").detach().to_local()
    parameter[:1] = np.nan


@pytest.mark.parametrize("count", [1, 2], ids=["one_step", "a_pass_before_the_first_step"])
def test_log_probabilities_of_the_actors_that_are_not_finite_skip_every_step(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], count: int
) -> None:
    on_all(pool, spoil)
    before = checksum(pool)
    updated = asyncio.run(pool.update(train_batch(0, *[sequences] * count)))
    assert updated.skipped == tuple(range(count)) and checksum(pool) == before
    assert updated.metrics["parity/non_finite_tokens"] == count * sum(response for _, response in LENGTHS)


def test_three_skipped_steps_in_a_row_stop_and_the_ranks_still_save(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    bad = other(sequences)
    before = checksum(pool)
    with pytest.raises(BatchRefused, match=r"NonFiniteError: 3 optimizer steps in a row were skipped") as refused:
        asyncio.run(pool.update(train_batch(0, bad, bad, bad, sequences)))
    assert refused.value.reason == "nonfinite" and checksum(pool) == before
    asyncio.run(pool.save(str(tmp_path / "zero"), 0))
    asyncio.run(pool.update(train_batch(0, sequences)))  # ends the row

    pool = start_pool(pool._cfg)
    updated = asyncio.run(pool.update(train_batch(0, sequences, bad, bad, bad, sequences)))
    assert updated.skipped == (1, 2, 3) and "3 optimizer steps in a row" in updated.stop
    assert updated.metrics["actor/optimizer_steps"] == 1, "none is taken after them"
    asyncio.run(pool.save(str(tmp_path / "one"), 1))
