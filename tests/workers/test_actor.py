"""The actors on one and two gloo ranks against plain transformers and plain torch."""

import asyncio
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.config.schema import Config
from tests.support.training.plain_reference import (
    CHECKPOINT_S,
    LENGTHS,
    UPDATE_S,
    VOCABULARY,
    checksum,
    distance,
    full_gradients,
    full_weights,
    make_config,
    make_model,
    make_sequences,
    on_all,
    plain_logprobs,
    plain_loss,
    reference,
    start_pool,
    train_batch,
    update,
)
from workers.actor import ActorPool, split_batch

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp(name), tied=name == "tied") for name in ("tied", "untied")}


@dataclasses.dataclass(frozen=True)
class Started:
    """A running pool and its configuration."""

    pool: ActorPool
    cfg: Config


@pytest.fixture
def pools(model_dirs: dict[str, Path]) -> Callable[..., Started]:
    """pools(model, ranks), in the first state.

    The tied model also checkpoints activations and frees parameters after the forward pass.
    """

    def get(model: str, ranks: int, dtype: str = "float32") -> Started:
        cfg = make_config(model_dirs[model], num_workers=ranks, reshard_after_forward=model == "tied")
        cfg.model.gradient_checkpointing = "full" if model == "tied" else "none"
        cfg.model.dtype = dtype
        return Started(start_pool(cfg), cfg)

    return get


def test_the_gradient_is_that_of_plain_transformers_where_a_rank_has_no_sequence(
    pools: Callable[..., Started], model_dirs: dict[str, Path]
) -> None:
    """Any other split: test_parity and test_invariance."""
    sequences = make_sequences(model_dirs["tied"], LENGTHS[:1])
    plain = reference(model_dirs["tied"])
    plain_loss(plain, sequences).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    works = split_batch(train_batch(0, sequences), 2, 96)
    assert [[len(each) for each in work.minibatches[0]] for work in works] == [[1], [0]]
    for found in on_all(pools("tied", 2).pool, full_gradients, works):
        assert distance(found, wanted) <= 1e-5


def test_bfloat16_is_only_the_compute_type(
    pools: Callable[..., Started], model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Master weights, gradients and weight export stay float32; the Hugging Face export is in the compute type."""
    sequences = make_sequences(model_dirs["tied"], LENGTHS)
    plain = reference(model_dirs["tied"])
    plain_loss(plain, sequences).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    pool = pools("tied", 1, "bfloat16").pool
    works = split_batch(train_batch(0, sequences), 1, 25)
    gradients = on_all(pool, full_gradients, works)[0]
    assert 1e-4 <= distance(gradients, wanted) <= 0.1
    weights = on_all(pool, full_weights)[0]
    assert {t.dtype for t in (*gradients.values(), *weights.values())} == {torch.float32}
    assert distance(weights, {name: p.detach() for name, p in plain.named_parameters()}) == 0.0
    asyncio.run(pool.export_hf(str(tmp_path / "hf")))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.dtype == torch.bfloat16
    assert torch.equal(exported.model.embed_tokens.weight, weights["model.embed_tokens.weight"].bfloat16())


def test_update_is_that_of_plain_torch(pools: Callable[..., Started], model_dirs: dict[str, Path]) -> None:
    """Two mini-batches: the second's ratio is against the policy before the first step. Clipping and warm-up act."""
    started = pools("untied", 2)
    minibatches = tuple(make_sequences(model_dirs["untied"], LENGTHS, seed) for seed in (0, 1))
    metrics = update(started.pool, train_batch(2, *minibatches))

    plain = reference(model_dirs["untied"])
    optim = started.cfg.actor.optim
    lr = optim.lr * 3 / optim.lr_warmup_steps
    adamw = torch.optim.AdamW(plain.parameters(), lr=lr, betas=tuple(optim.betas), eps=optim.eps, weight_decay=0.1)
    losses, norms = [], []
    for sequences in minibatches:
        loss = plain_loss(plain, sequences, [torch.from_numpy(s.rollout_logprobs) for s in sequences])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), optim.grad_clip)))
        losses.append(loss.item())
        adamw.step()
        adamw.zero_grad()

    assert min(norms) > optim.grad_clip
    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    before = {name: p.detach() for name, p in reference(model_dirs["untied"]).named_parameters()}
    for found in on_all(started.pool, full_weights):
        moved = {name: found[name] - before[name] for name in before}
        assert distance(moved, {name: wanted[name] - before[name] for name in before}) <= 1e-3
    assert metrics["actor/loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert metrics["actor/lr"] == pytest.approx(lr)
    assert metrics["actor/response_tokens"] == 2 * sum(response for _, response in LENGTHS)
    assert 0 <= metrics["parity/mean_abs_logprob_diff"] <= metrics["parity/max_abs_logprob_diff"] <= 1e-4
    assert metrics["actor/ratio_max"] > 1.0 and metrics["actor/approx_kl"] != 0.0
    assert 0 < metrics["actor/entropy"] <= math.log(VOCABULARY)


def test_first_update_moves_every_parameter(pools: Callable[..., Started], model_dirs: dict[str, Path]) -> None:
    started = pools("tied", 2)
    before = on_all(started.pool, full_weights)[0]
    batch = train_batch(0, make_sequences(model_dirs["tied"], LENGTHS))
    metrics = update(started.pool, batch)
    after = on_all(started.pool, full_weights)[0]
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert metrics["actor/approx_kl"] == 0.0 and metrics["actor/ratio_max"] == 1.0


def test_saved_state_continues_bit_for_bit(
    pools: Callable[..., Started], model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    pool = pools("untied", 2).pool
    batches = [train_batch(v, make_sequences(model_dirs["untied"], LENGTHS, seed=v)) for v in range(2)]
    asyncio.run(pool.update(batches[0]))
    asyncio.run(pool.save(str(tmp_path / "state"), 1))
    saved = checksum(pool)
    asyncio.run(pool.update(batches[1]))
    continued = checksum(pool)
    assert saved != continued

    asyncio.run(pool.load(str(tmp_path / "state"), 1))
    assert checksum(pool) == saved
    asyncio.run(pool.update(batches[1]))
    assert checksum(pool) == continued

    weights = on_all(pool, full_weights)[0]
    alone = pools("untied", 1).pool
    asyncio.run(alone.load(str(tmp_path / "state"), 1))
    assert checksum(alone) == saved
    asyncio.run(alone.update(batches[1]))
    assert distance(on_all(alone, full_weights)[0], weights) <= 1e-6


def test_three_steps_each_on_two_ranks_one_and_two_are_nine_on_two(
    pools: Callable[..., Started], model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """But for the rounding of sums in another order."""
    batches = []
    for version in range(9):
        sequences = make_sequences(model_dirs["untied"], LENGTHS, seed=version)
        stale = [dataclasses.replace(s, staleness=np.ones_like(s.staleness)) for s in sequences]  # no parity is due
        batches.append(train_batch(version, tuple(stale)))

    def train(pool: ActorPool, first: int, last: int) -> dict[str, torch.Tensor]:
        for batch in batches[first:last]:
            asyncio.run(pool.update(batch))
        weights: dict[str, torch.Tensor] = on_all(pool, full_weights)[0]
        return weights

    whole = pools("untied", 2).pool
    before = {name: w.clone() for name, w in on_all(whole, full_weights)[0].items()}
    wanted = train(whole, 0, 9)
    assert distance(wanted, before) > 1e-3, "a thousand times what rounding may leave"

    saved = checksum(pools("untied", 2).pool)
    for part, ranks in enumerate((2, 1, 2)):
        pool, done = pools("untied", ranks).pool, 3 * part
        if part:
            asyncio.run(pool.load(str(tmp_path / f"{done}"), done))
        assert checksum(pool) == saved
        found = train(pool, done, done + 3)
        saved = checksum(pool)
        asyncio.run(pool.save(str(tmp_path / f"{done + 3}"), done + 3))
    assert distance(found, wanted) <= 1e-6
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-6


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_export_loads_in_transformers(
    pools: Callable[..., Started], model_dirs: dict[str, Path], tmp_path: Path, model: str
) -> None:
    pool = pools(model, 2).pool
    sequences = make_sequences(model_dirs[model], LENGTHS)
    asyncio.run(pool.update(train_batch(0, sequences)))
    asyncio.run(pool.export_hf(str(tmp_path / "hf")))

    exported = reference(tmp_path / "hf")
    assert exported.config.tie_word_embeddings == (model == "tied")
    assert exported.config._attn_implementation == "sdpa"
    plain = reference(model_dirs[model])
    plain.load_state_dict(on_all(pool, full_weights)[0], strict=model == "untied")
    for sequence in sequences:
        assert torch.equal(plain_logprobs(exported, sequence), plain_logprobs(plain, sequence))
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "hf", model_dirs[model]))
    assert ours.get_vocab() == theirs.get_vocab()


def test_a_sequence_beyond_the_bound_is_refused_by_the_driver(
    pools: Callable[..., Started], model_dirs: dict[str, Path]
) -> None:
    sequences = make_sequences(model_dirs["untied"], [(40, 25)])
    with pytest.raises(ValueError, match=r"`actor.max_tokens_per_gpu` x .* \(64\) .* 65 tokens"):
        asyncio.run(pools("untied", 2).pool.update(train_batch(0, sequences)))


def timeouts(worker: Any) -> set[float]:
    """Runs on a rank: of all its process groups, in seconds."""
    import torch.distributed as dist

    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) >= 5, "all ranks, again for files, copies, shards, and those that share a sequence"
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_every_process_group_has_the_deadline_of_an_update_or_of_a_checkpoint(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Those that FSDP, the optimizer or a checkpoint may have made too."""
    model = model_dirs["untied"]
    pool = start_pool(make_config(model, num_workers=4, fsdp_size=2, ulysses_sequence_parallel_size=2))
    asyncio.run(pool.update(train_batch(0, make_sequences(model, LENGTHS))))
    asyncio.run(pool.save(str(tmp_path / "state"), 1))
    asyncio.run(pool.load(str(tmp_path / "state"), 1))
    asyncio.run(pool.export_hf(str(tmp_path / "hf")))
    assert on_all(pool, timeouts) == [{UPDATE_S, CHECKPOINT_S}] * 4
