"""Training in float16 on real gloo ranks: the loss scale makes small gradients count, adapts itself, and is saved."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo.config.schema import Config
from dapo.pools import BatchRefused
from dapo.types import TrainBatch, TrainSequence
from tests.support.report.reference import undocumented
from tests.support.training.plain_reference import (
    LENGTHS,
    checksum,
    distance,
    full_gradients,
    make_config,
    make_model,
    make_sequences,
    on_all,
    plain_loss,
    reference,
    save,
    start_pool,
    train_batch,
    update,
)
from workers.actor import ActorPool, split_batch
from workers.training.scaling import FIRST, FLOOR

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


LOW = 2.0**10  # with which no gradient of this model overflows


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


def configured(model_dir: Path, ranks: int = 2, dtype: str = "float16", **actor: Any) -> Config:
    cfg = make_config(model_dir, num_workers=ranks, **actor)
    cfg.model.dtype = dtype
    return cfg


def weighted(sequences: tuple[TrainSequence, ...], factor: float) -> tuple[TrainSequence, ...]:
    return tuple(dataclasses.replace(each, token_weight=each.token_weight * factor) for each in sequences)


def set_scale(worker: Any, value: float) -> None:
    """Runs on a rank."""
    worker._updater.scale._scaler.update(value)


def scale_state(worker: Any) -> list[float]:
    """Runs on a rank: scale, and finite steps since it last changed."""
    [state] = worker._updater.scale.state().values()
    return state.tolist()


def everywhere(pool: ActorPool, value: float) -> None:
    on_all(pool, set_scale, [value] * len(pool._ranks.workers))


def states(pool: ActorPool) -> list[float]:
    """Equal on all ranks."""
    first, *others = on_all(pool, scale_state)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("reshard", [pytest.param(True, id="reshard"), pytest.param(False, id="gathered")])
def test_gradients_too_small_for_float16_are_those_of_plain_float32(model_dir: Path, reshard: bool) -> None:
    sequences = weighted(make_sequences(model_dir, LENGTHS), 1e-6)
    plain = reference(model_dir)
    plain_loss(plain, sequences).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    pool = start_pool(configured(model_dir, reshard_after_forward=reshard))
    works = split_batch(train_batch(0, sequences), 2, 25)

    def largest() -> float:
        return max(distance(found, wanted) for found in on_all(pool, full_gradients, works))

    assert states(pool)[0] == FIRST
    on_all(pool, forget)
    assert 1e-5 < largest() <= 0.02
    on_all(pool, forget)
    everywhere(pool, 1.0)
    assert largest() > 0.3, "without scaling most of it is lost"
    on_all(pool, forget)


def forget(worker: Any) -> None:
    """Runs on a rank."""
    worker._updater.scale.forget()


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(model_dir: Path) -> None:
    """It is neither counted as a step that is not finite, nor are its groups put aside; finite steps are trained."""
    pool = start_pool(configured(model_dir))
    good = make_sequences(model_dir, LENGTHS)
    high = (*weighted(good[:1], 1e6), *good[1:])  # the first rank has it
    before = checksum(pool)
    updated = asyncio.run(pool.update(train_batch(0, high)))
    metrics = updated.metrics
    assert (metrics["actor/overflowed_steps"], metrics["actor/skipped_steps"], metrics["actor/optimizer_steps"]) == (
        1,
        0,
        0,
    )
    assert updated.skipped == () and metrics["actor/loss_scale"] == FIRST / 2
    assert checksum(pool) == before and states(pool) == [FIRST / 2, 0]
    assert undocumented(metrics) == []
    metrics = update(pool, train_batch(1, good, good))
    assert (metrics["actor/overflowed_steps"], metrics["actor/optimizer_steps"]) == (0, 2)
    assert checksum(pool) != before and states(pool) == [FIRST / 2, 2]


def test_only_at_its_floor_do_overflows_count_to_three_in_a_row(model_dir: Path) -> None:
    pool = start_pool(configured(model_dir))
    high = weighted(make_sequences(model_dir, LENGTHS), 1e9)  # the loss is finite in float32, its gradient never
    everywhere(pool, 4 * FLOOR)
    order = TrainBatch(version=0, minibatches=(high,), order=(0, 0))
    before = checksum(pool)
    metrics = asyncio.run(pool.update(order)).metrics
    assert (metrics["actor/overflowed_steps"], metrics["actor/loss_scale"]) == (2, FLOOR)
    with pytest.raises(BatchRefused, match="3 optimizer steps in a row were skipped") as refused:
        asyncio.run(pool.update(dataclasses.replace(order, version=1, order=(0,) * 5)))
    assert refused.value.reason == "nonfinite" and states(pool)[0] == FLOOR and checksum(pool) == before


def test_a_loss_that_is_not_finite_is_no_overflow(model_dir: Path) -> None:
    pool = start_pool(configured(model_dir))
    good = make_sequences(model_dir, LENGTHS)
    metrics = update(pool, train_batch(0, (dataclasses.replace(good[0], advantage=np.inf), *good[1:]), good))
    assert (metrics["actor/skipped_steps"], metrics["actor/optimizer_steps"]) == (1, 1)
    assert metrics["actor/overflowed_steps"] == 0


def test_the_scale_grows_after_many_finite_steps_and_a_checkpoint_goes_on_bit_for_bit(
    model_dir: Path, tmp_path: Path
) -> None:
    pool = start_pool(configured(model_dir))
    batches = [
        train_batch(v, *[make_sequences(model_dir, LENGTHS, seed=9 * v + k) for k in range(3)]) for v in range(3)
    ]
    on_all(pool, grow_after, [4] * 2)
    everywhere(pool, LOW)
    asyncio.run(pool.update(batches[0]))
    save(pool, tmp_path / "state")
    assert states(pool) == [LOW, 3]
    asyncio.run(pool.update(batches[1]))
    assert states(pool) == [2 * LOW, 2]
    continued = checksum(pool)
    for ranks in (2, 1):
        again = start_pool(configured(model_dir, ranks))
        on_all(again, grow_after, [4] * ranks)
        asyncio.run(again.load(str(tmp_path / "state"), 1))
        assert states(again) == [LOW, 3]
        asyncio.run(again.update(batches[1]))
        assert states(again) == [2 * LOW, 2] and (ranks == 1 or checksum(again) == continued)


def grow_after(worker: Any, steps: int) -> None:
    """Runs on a rank."""
    worker._updater.scale._scaler.set_growth_interval(steps)


def test_a_checkpoint_of_another_type_leaves_the_scale_as_it_was(model_dir: Path, tmp_path: Path) -> None:
    wide = start_pool(configured(model_dir, dtype="float32"))
    sequences = make_sequences(model_dir, LENGTHS)
    metrics = update(wide, train_batch(0, sequences))
    assert "actor/loss_scale" not in metrics and "actor/overflowed_steps" not in metrics
    save(wide, tmp_path / "wide")
    saved = checksum(wide)
    narrow = start_pool(configured(model_dir))
    asyncio.run(narrow.load(str(tmp_path / "wide"), 1))
    assert checksum(narrow) == saved and states(narrow) == [FIRST, 0]
    save(narrow, tmp_path / "narrow")
    wide = start_pool(configured(model_dir, dtype="float32"))
    asyncio.run(wide.load(str(tmp_path / "narrow"), 1))
    assert checksum(wide) == saved


def test_a_scale_is_a_power_of_two() -> None:
    """Else to divide by it would round."""
    assert torch.frexp(torch.tensor([FIRST, FLOOR]))[0].tolist() == [0.5, 0.5]
