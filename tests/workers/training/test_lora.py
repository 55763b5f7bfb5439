"""LoRA against peft in a plain transformers model; what leaves the actors has it merged."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

from dapo.config.actor import LoraConfig
from dapo.config.schema import Config
from dapo.types import TrainSequence
from dapo.workers.actor import ActorWorker, split_batch
from dapo.workers.training.collective_errors import FilesError
from dapo.workers.training.fsdp import reshard
from dapo.workers.training.lora import _fill, base_name, is_adapter
from tests.support.training.plain_reference import (
    LENGTHS,
    checksum,
    distance,
    full_gradients,
    full_weights,
    make_config,
    make_sequences,
    on_all,
    plain_gradients,
    plain_logprobs,
    rebuild,
    reference,
    start_pool,
    train_batch,
    update,
    update_here,
)
from tests.support.training.plain_update import plain_update

RANK, ALPHA = 3, 12.0  # two ranks hold unequal parts of A
TARGETS = ["q_proj", "v_proj", "layers.1.mlp.down_proj"]
Tensors = dict[str, torch.Tensor]


def configured(model: Path, ranks: int = 1, *, rank: int = RANK, **actor: Any) -> Config:
    """Two ranks also checkpoint activations and free parameters after the forward pass."""
    cfg = make_config(model, num_workers=ranks, reshard_after_forward=ranks == 2, **actor)
    cfg.model.gradient_checkpointing = "full" if ranks == 2 else "none"
    cfg.model.lora = LoraConfig(rank=rank, alpha=ALPHA, target_modules=TARGETS)
    return cfg


def adapters(worker: Any) -> Tensors:
    """Runs on a rank: all of A and B."""
    return {n: p.detach().full_tensor().clone() for n, p in worker._policy.model.named_parameters() if is_adapter(n)}


def base_weights(worker: Any) -> Tensors:
    reshard(worker._policy)
    named = worker._policy.model.named_parameters()
    return {base_name(n): p.detach().full_tensor() for n, p in named if not is_adapter(n)}


def shake(worker: Any) -> Tensors:
    """Runs on a rank: B is zero at first, and A has no gradient then. Returns A and the new B."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in worker._policy.model.named_parameters():
        if ".lora_B." in name:
            full = 0.1 * torch.randn(parameter.shape, generator=generator)
            with torch.no_grad():
                _fill(parameter, full)
    return adapters(worker)


def trained_logprobs(worker: Any, sequences: Sequence[TrainSequence]) -> torch.Tensor:
    with torch.no_grad():
        found = worker._policy(worker._updater._collate(sequences))[0]
    reshard(worker._policy)
    return found


def plain_lora(model_dir: Path, values: Tensors) -> Qwen2ForCausalLM:
    """peft's own way, with the actors' A and B."""
    config = PeftConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0)
    model = get_peft_model(reference(model_dir), config).base_model.model
    assert {name for name, p in model.named_parameters() if p.requires_grad} == values.keys()
    model.load_state_dict(values, strict=False)
    return model


def worst(found: Tensors, wanted: Tensors) -> float:
    """Largest relative error of a tensor, in norms."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted)


def logprobs_of(model: Qwen2ForCausalLM, sequences: Sequence[TrainSequence]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([plain_logprobs(model, sequence) for sequence in sequences])


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-5)


def assert_merged(weights: Tensors, stored: Tensors, values: Tensors) -> None:
    """weights: what leaves the actors; stored: the base model; values: A and B."""
    assert weights.keys() == stored.keys()
    adapted = {base_name(name).partition(".lora_")[0] + ".weight" for name in values}
    for name, tensor in weights.items():
        wanted = stored[name].double()
        if name in adapted:
            up, down = (values[f"{name.removesuffix('.weight')}.lora_{x}.default.weight"].double() for x in "BA")
            assert float((up @ down).norm()) > 0
            wanted = wanted + ALPHA / RANK * up @ down
        assert float((tensor.double() - wanted).norm() / wanted.norm()) <= (1e-7 if name in adapted else 0)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_update_with_a_reference_policy_is_that_of_plain_torch(
    rank: ActorWorker, tied_dir: Path, model_dir: Path, tied: bool
) -> None:
    """Clipping, weight decay and the KL to the base model act; the base itself stays bit for bit as in its file."""
    directory = tied_dir if tied else model_dir  # then a frozen embedding is a unit of its own
    cfg = configured(directory)
    cfg.algorithm.kl.loss_coeff = 0.3
    rebuild(rank, cfg)
    plain = plain_lora(directory, shake(rank))
    sequences = make_sequences(directory, LENGTHS)
    assert close(trained_logprobs(rank, sequences), logprobs_of(plain, sequences))
    sequences = tuple(dataclasses.replace(s, rollout_logprobs=logprobs_of(plain, [s]).numpy()) for s in sequences)
    [work] = split_batch(train_batch(0, sequences), 1, 25)
    assert worst(full_gradients(rank, work), plain_gradients(plain, sequences)) <= 1e-5
    plain.zero_grad()
    batch = train_batch(2, sequences[:3], sequences[3:])

    metrics = update_here(rank, batch).metrics
    expected = plain_update(plain, cfg, batch, reference(directory))
    assert metrics["actor/ref_kl"] == pytest.approx(expected["actor/ref_kl"], rel=1e-4) and metrics["actor/ref_kl"] > 0
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    assert metrics["actor/loss"] == pytest.approx(expected["actor/loss"], abs=1e-5)
    found = adapters(rank)
    assert worst(found, {n: p.detach() for n, p in plain.named_parameters() if n in found}) <= 1e-5
    stored, base = load_file(directory / "model.safetensors"), base_weights(rank)
    assert base.keys() == stored.keys() and all(torch.equal(base[name], stored[name]) for name in stored)
    own = rank.logprobs([sequences], reference=True)
    assert close(torch.from_numpy(np.concatenate(own)), logprobs_of(reference(directory), sequences))
    named = dict(rank._policy.model.named_parameters())
    assert all(isinstance(p, DTensor) for p in named.values())
    names = {id(p): name for name, p in named.items()}
    optimized = {names[id(p)] for p in rank._optimizer.state}
    assert {n for n, p in named.items() if p.requires_grad} == optimized == found.keys()


def test_bfloat16_base_with_float32_adapters(rank: ActorWorker, tied_dir: Path, tmp_path: Path) -> None:
    """What is frozen needs no master weights; what trains, is reduced or leaves for the engines is float32."""
    cfg = configured(tied_dir)
    cfg.model.dtype = "bfloat16"
    rebuild(rank, cfg)
    values = shake(rank)
    stored = {name: tensor.bfloat16() for name, tensor in load_file(tied_dir / "model.safetensors").items()}
    sequences = make_sequences(tied_dir, LENGTHS)
    gradients = full_gradients(rank, split_batch(train_batch(0, sequences), 1, 25)[0])
    assert 1e-4 <= distance(gradients, plain_gradients(plain_lora(tied_dir, values), sequences)) <= 0.1
    base, weights = base_weights(rank), full_weights(rank)
    assert {t.dtype for t in (*gradients.values(), *weights.values(), *values.values())} == {torch.float32}
    assert all(torch.equal(base[name], stored[name]) for name in stored)
    assert_merged(weights, stored, values)
    rank.export_hf(str(tmp_path / "hf"))
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], weights[name].bfloat16()) for name in stored)


def test_what_leaves_the_actors_is_merged(rank: ActorWorker, tied_dir: Path, tmp_path: Path) -> None:
    """Weight sync and export, for transformers and vLLM as they are; beside it the adapter for peft."""
    rebuild(rank, configured(tied_dir))
    values = shake(rank)
    assert_merged(full_weights(rank), load_file(tied_dir / "model.safetensors"), values)
    rank.export_hf(str(tmp_path / "hf"))
    sequences = make_sequences(tied_dir, LENGTHS)
    found = trained_logprobs(rank, sequences)
    assert close(found, logprobs_of(reference(tmp_path / "hf"), sequences))
    alone = PeftModel.from_pretrained(reference(tied_dir), tmp_path / "hf" / "adapter")
    assert close(found, logprobs_of(alone, sequences))


@pytest.mark.ray
def test_adapters_and_their_state_are_the_same_on_another_number_of_ranks(
    ray_cluster: None, rank: ActorWorker, tied_dir: Path, tmp_path: Path
) -> None:
    cfg = configured(tied_dir)
    rebuild(rank, cfg)
    first = adapters(rank)
    down = [tensor for name, tensor in first.items() if ".lora_A." in name]
    assert all(0 < float(a.abs().max()) <= a.shape[1] ** -0.5 for a in down)
    assert len({float(a.sum()) for a in down}) == len(down)
    assert not any(float(tensor.abs().max()) for name, tensor in first.items() if ".lora_B." in name)

    pool = start_pool(configured(tied_dir, 2))
    found = on_all(pool, adapters)[0]
    assert all(torch.equal(found[name], first[name]) for name in first)
    batches = [train_batch(v, make_sequences(tied_dir, LENGTHS, seed=v)) for v in range(2)]
    update(pool, batches[0])
    asyncio.run(pool.save(str(tmp_path / "state"), 1))
    saved = on_all(pool, adapters)[0]
    update(pool, batches[1])
    continued, values = checksum(pool), on_all(pool, adapters)[0]
    pool = start_pool(configured(tied_dir, 2))
    asyncio.run(pool.load(str(tmp_path / "state"), 1))
    update(pool, batches[1])
    assert checksum(pool) == continued

    stored = FileSystemReader(tmp_path / "state").read_metadata().state_dict_metadata
    assert {name.removeprefix("model.model.") for name in stored if "optimizer" not in name} == values.keys()
    rank.load(str(tmp_path / "state"), 1)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in adapters(rank).items())
    update_here(rank, batches[1])
    assert worst(adapters(rank), values) <= 1e-5


def test_a_checkpoint_of_other_adapters_is_refused(rank: ActorWorker, tied_dir: Path, tmp_path: Path) -> None:
    rebuild(rank, configured(tied_dir))
    rank.save(str(tmp_path), 0)
    file = tmp_path / "lora.json"
    saved = file.read_text()
    for key, value, message in (
        ("model.lora.rank", 8, r"`model.lora.rank` \(3\) .* \(8\)"),
        ("model.lora.alpha", 6.0, r"`model.lora.alpha` \(12.0\) .* \(6.0\)"),
        ("model.lora.target_modules", ["a.k_proj"], r"\(q_proj, v_proj, down_proj\) .* \(k_proj\)"),
        ("model.path", "0" * 64, r"`model.path` \([0-9a-f]{64}\) differs"),
    ):
        file.write_text(json.dumps(json.loads(saved) | {key: value}))
        with pytest.raises(FilesError, match=message):
            rank.load(str(tmp_path), 0)
    file.unlink()
    with pytest.raises(FilesError, match=r"whole model and no adapters .* `model.lora.rank=0`"):
        rank.load(str(tmp_path), 0)
    file.write_text(saved)
    rebuild(rank, configured(tied_dir, rank=0))
    with pytest.raises(FilesError, match=r"adapters only \(lora.json\); set `model.lora` as"):
        rank.load(str(tmp_path), 0)
