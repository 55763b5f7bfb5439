"""Ranks with LoRA, what the tests ask of them, and the same adapters in peft's own way."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

from dapo.config.schema import Config
from dapo.types import TrainBatch, TrainSequence
from tests.support.training.plain_reference import (
    on_all,
    plain_logprobs,
    rank_checksum,
    rebuild,
    reference,
    start_pool,
    update,
    update_on,
)
from workers.actor import ActorWorker, RankWork, split_batch
from workers.training.fsdp import reshard
from workers.training.lora import _fill, base_name, is_adapter

RANK, ALPHA = 3, 12.0  # two ranks hold unequal parts of A
TARGETS = ["q_proj", "v_proj", "layers.1.mlp.down_proj"]
Tensors = dict[str, torch.Tensor]


class Ranks:
    """Two ranks of a pool or, in this process, one."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self._pool, self._alone = None, None
        if cfg.actor.num_workers > 1:
            self._pool = start_pool(cfg)
        else:
            self._alone = ActorWorker(cfg, "cpu")
            with socket.socket() as server:
                server.bind(("127.0.0.1", 0))
                port = server.getsockname()[1]
            self._alone.start(0, 1, "127.0.0.1", port)

    def all(self, function: Callable[..., Any], *args: Sequence[Any]) -> list[Any]:
        """function(worker, *args of the rank) on every rank."""
        if self._pool:
            return on_all(self._pool, function, *args)
        return [function(self._alone, *(arg[0] for arg in args))]

    def build(self, cfg: Config) -> "Ranks":
        self.cfg = cfg
        self.all(rebuild, [cfg] * cfg.actor.num_workers)
        return self

    def update(self, batch: TrainBatch) -> dict[str, float]:
        if self._pool:
            return update(self._pool, batch)
        return update_on(self._alone, split_batch(batch, 1, 64)[0]).metrics

    def call(self, method: str, *args: Any) -> Any:
        """save, load or export_hf."""
        one = self._pool or self._alone
        found = getattr(one, method)(*args)
        return asyncio.run(found) if self._pool else found

    def checksum(self) -> str:
        """Returns the checksum of all parameters, equal on all ranks."""
        [found] = set(self.all(rank_checksum))
        return found

    def close(self) -> None:
        """The pool is not this one's own."""
        if self._alone:
            torch.distributed.destroy_process_group()


def adapters(worker: Any) -> Tensors:
    """Runs on a rank: all of A and B."""
    return {n: p.detach().full_tensor() for n, p in worker._policy.model.named_parameters() if is_adapter(n)}


def base_weights(worker: Any) -> Tensors:
    """Runs on a rank."""
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


def trained_logprobs(worker: Any, work: RankWork) -> torch.Tensor:
    """Runs on a rank: of all its response tokens."""
    with torch.no_grad():
        found = [worker._policy(worker._updater._collate(part))[0] for part in work.minibatches[0]]
    reshard(worker._policy)
    return torch.cat(found)


def reference_logprobs(worker: Any, work: RankWork) -> list[torch.Tensor]:
    """Runs on a rank: [R] of each of its sequences."""
    return [own for part in worker._updater.reference_logprobs(work.minibatches[0]) for own in part]


def sharded_trainable(worker: Any) -> tuple[set[str], set[str]]:
    """Runs on a rank: names of what trains, and of what the optimizer holds state for."""
    named = dict(worker._policy.model.named_parameters())
    assert all(isinstance(p, DTensor) for p in named.values())
    names = {id(p): name for name, p in named.items()}
    return {n for n, p in named.items() if p.requires_grad}, {names[id(p)] for p in worker._optimizer.state}


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


def sequences_of(work: RankWork) -> list[TrainSequence]:
    return [sequence for micro_batch in work.minibatches[0] for sequence in micro_batch]


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-5)
