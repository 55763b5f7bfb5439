"""Training in float16: the loss scale makes small gradients count, adapts itself, and is saved."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dapo.config.schema import Config
from dapo.types import TrainBatch, TrainSequence
from dapo.workers.actor import ActorWorker, split_batch
from dapo.workers.training import update as update_module
from dapo.workers.training.optimizer import FIRST, FLOOR, LossScale
from dapo.workers.training.update import NonFiniteError, Updater
from tests.support.report.reference import undocumented
from tests.support.training.plain_reference import (
    LENGTHS,
    checksum,
    distance,
    full_gradients,
    make_config,
    make_sequences,
    on_all,
    plain_gradients,
    rank_checksum,
    rebuild,
    reference,
    start_pool,
    train_batch,
    update,
    update_here,
)

LOW = 2.0**10  # with which no gradient of this model overflows


def configured(model_dir: Path, ranks: int = 1, dtype: str = "float16", **actor: Any) -> Config:
    cfg = make_config(model_dir, num_workers=ranks, **actor)
    cfg.model.dtype = dtype
    return cfg


def weighted(sequences: tuple[TrainSequence, ...], factor: float) -> tuple[TrainSequence, ...]:
    return tuple(dataclasses.replace(each, token_weight=each.token_weight * factor) for each in sequences)


def scale_state(worker: Any) -> list[float]:
    """Runs on a rank: scale, and finite steps since it last changed."""
    [state] = worker._updater.scale.state().values()
    return state.tolist()


def set_scale(worker: ActorWorker, value: float, grow_after: int = 2000) -> None:
    worker._updater.scale._scaler.update(value)
    worker._updater.scale._scaler.set_growth_interval(grow_after)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "gathered"])
def test_gradients_too_small_for_float16_are_those_of_plain_float32(
    rank: ActorWorker, model_dir: Path, reshard: bool
) -> None:
    sequences = weighted(make_sequences(model_dir, LENGTHS), 1e-6)
    wanted = plain_gradients(reference(model_dir), sequences)
    rebuild(rank, configured(model_dir, reshard_after_forward=reshard))
    [work] = split_batch(train_batch(0, sequences), 1, 25)
    assert scale_state(rank)[0] == FIRST
    assert 1e-5 < distance(full_gradients(rank, work), wanted) <= 0.02
    rank._updater.scale.forget()
    set_scale(rank, 1.0)
    assert distance(full_gradients(rank, work), wanted) > 0.3, "without scaling most of it is lost"


@pytest.mark.ray
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(ray_cluster: None, model_dir: Path) -> None:
    """It is neither counted as a step that is not finite, nor are its groups put aside; finite steps are trained."""
    pool = start_pool(configured(model_dir, 2))
    good = make_sequences(model_dir, LENGTHS)
    high = (*weighted(good[:1], 1e6), *good[1:])  # the first rank has it
    before = checksum(pool)
    updated = asyncio.run(pool.update(train_batch(0, high)))
    metrics = updated.metrics
    assert [metrics[f"actor/{kind}_steps"] for kind in ("overflowed", "skipped", "optimizer")] == [1, 0, 0]
    assert updated.skipped == () and metrics["actor/loss_scale"] == FIRST / 2
    assert checksum(pool) == before and on_all(pool, scale_state) == [[FIRST / 2, 0]] * 2
    assert undocumented(metrics) == []
    metrics = update(pool, train_batch(1, good, good))
    assert (metrics["actor/overflowed_steps"], metrics["actor/optimizer_steps"]) == (0, 2)
    assert checksum(pool) != before and on_all(pool, scale_state) == [[FIRST / 2, 2]] * 2


def test_only_at_its_floor_do_overflows_count_to_three_in_a_row(rank: ActorWorker, model_dir: Path) -> None:
    rebuild(rank, configured(model_dir))
    high = weighted(make_sequences(model_dir, LENGTHS), 1e9)  # the loss is finite in float32, its gradient never
    set_scale(rank, 4 * FLOOR)
    order = TrainBatch(version=0, minibatches=(high,), order=(0, 0))
    before = rank_checksum(rank)
    metrics = update_here(rank, order).metrics
    assert (metrics["actor/overflowed_steps"], metrics["actor/loss_scale"]) == (2, FLOOR)
    with pytest.raises(NonFiniteError, match="3 optimizer steps in a row were skipped"):
        update_here(rank, dataclasses.replace(order, version=1, order=(0,) * 5))
    assert scale_state(rank)[0] == FLOOR and rank_checksum(rank) == before


def test_a_loss_that_is_not_finite_is_no_overflow(rank: ActorWorker, model_dir: Path) -> None:
    rebuild(rank, configured(model_dir))
    good = make_sequences(model_dir, LENGTHS)
    bad = (dataclasses.replace(good[0], advantage=np.inf), *good[1:])
    metrics = update_here(rank, train_batch(0, bad, good)).metrics
    assert [metrics[f"actor/{kind}_steps"] for kind in ("overflowed", "skipped", "optimizer")] == [0, 1, 1]


def test_the_scale_grows_after_many_finite_steps_and_a_checkpoint_goes_on_bit_for_bit(
    rank: ActorWorker, model_dir: Path, tmp_path: Path
) -> None:
    first, second = (
        train_batch(v, *[make_sequences(model_dir, LENGTHS, seed=9 * v + k) for k in range(3)]) for v in range(2)
    )
    rebuild(rank, configured(model_dir))
    set_scale(rank, LOW, grow_after=4)
    update_here(rank, first)
    rank.save(str(tmp_path / "state"), 1)
    assert scale_state(rank) == [LOW, 3]
    update_here(rank, second)
    assert scale_state(rank) == [2 * LOW, 2]
    continued = rank_checksum(rank)
    rebuild(rank, configured(model_dir))
    set_scale(rank, FIRST, grow_after=4)
    rank.load(str(tmp_path / "state"), 1)
    assert scale_state(rank) == [LOW, 3]
    update_here(rank, second)
    assert scale_state(rank) == [2 * LOW, 2] and rank_checksum(rank) == continued


def test_a_checkpoint_of_another_type_leaves_the_scale_as_it_was(
    rank: ActorWorker, model_dir: Path, tmp_path: Path
) -> None:
    rebuild(rank, configured(model_dir, dtype="float32"))
    metrics = update_here(rank, train_batch(0, make_sequences(model_dir, LENGTHS))).metrics
    assert "actor/loss_scale" not in metrics and "actor/overflowed_steps" not in metrics
    rank.save(str(tmp_path / "wide"), 1)
    saved = rank_checksum(rank)
    rebuild(rank, configured(model_dir))
    rank.load(str(tmp_path / "wide"), 1)
    assert rank_checksum(rank) == saved and scale_state(rank) == [FIRST, 0]
    rank.save(str(tmp_path / "narrow"), 1)
    rebuild(rank, configured(model_dir, dtype="float32"))
    rank.load(str(tmp_path / "narrow"), 1)
    assert rank_checksum(rank) == saved


@pytest.mark.parametrize(("offload", "device"), [("none", "cuda"), ("phase", "cuda"), ("host", "cpu")])
def test_the_scale_is_on_the_device_of_the_gradients(monkeypatch, offload: str, device: str) -> None:
    """A step in float16 with `actor.offload=host` would divide by what its memory held before."""
    asked = []
    monkeypatch.setattr(update_module, "LossScale", lambda *given: asked.append(given))
    cfg = Config()
    cfg.model.dtype, cfg.actor.offload = "float16", offload
    Updater(nn.Linear(1, 1), None, None, cfg, SimpleNamespace(device="cuda"))
    assert asked == [("float16", device)]


def test_a_scale_in_host_memory_scales_and_divides() -> None:
    assert torch.frexp(torch.tensor([FIRST, FLOOR]))[0].tolist() == [0.5, 0.5], "powers of 2: no division rounds"
    layer = nn.Linear(2, 1, bias=False)
    scale = LossScale("float16", "cpu")
    scale.scaled(layer(torch.ones(2)).sum()).backward()
    assert layer.weight.grad.tolist() == [[FIRST, FIRST]]
    scale.unscale(torch.optim.SGD(layer.parameters(), lr=1.0))
    assert layer.weight.grad.tolist() == [[1.0, 1.0]] and not scale.update()
