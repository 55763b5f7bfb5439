"""Writes LoRA adapters in peft's format, and `lora.json` next to a checkpoint: loading refuses a checkpoint of another
rank, alpha, choice of layers or base model."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dapo.workers.training.collective_errors import OwnWork
from dapo.workers.training.fsdp import shard_sums
from dapo.workers.training.lora import ADAPTER, DOWN, Gather, base_name, has_adapters, is_adapter, peft_layer

IDENTITY_FILE = "lora.json"


def gather_adapters(model: nn.Module, gather: Gather) -> dict[str, Tensor]:
    """Returns, on rank 0, CPU copies of the adapters under their peft names. A collective."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            full = gather(parameter)
            if dist.get_rank() == 0:
                name_there = f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"
                tensors[name_there] = full.to("cpu", copy=True).contiguous()
    return tensors


def save_adapter_config(model: Any, base: str, directory: Path) -> None:
    """Writes the configuration that `PeftModel.from_pretrained` needs. base: `model.path`."""
    config = copy.copy(model.peft_config[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(directory)


def save_identity(found: dict[str, Any], directory: Path) -> None:
    (directory / IDENTITY_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def check_identity(model: nn.Module, directory: Path) -> None:
    """Raises FilesError unless the checkpoint has this model's adapters and base. A collective."""
    own = OwnWork()
    found = identity(model)
    with own:
        _compare(found, directory)
    own.meet(f"{directory} cannot be loaded")


def _compare(found: dict[str, Any], directory: Path) -> None:
    """Raises ValueError on a mismatch. found: the result of `identity`, empty without adapters."""
    path = directory / IDENTITY_FILE
    if not found:
        if path.exists():
            raise ValueError(
                f"{directory} holds adapters only ({path.name}); set `model.lora` as in the run that made it"
            )
        return
    if not path.exists():
        raise ValueError(f"{directory} holds a whole model and no adapters (no {path.name}); set `model.lora.rank=0`")
    saved = json.loads(path.read_text(encoding="utf-8"))
    for key, value in found.items():
        if saved.get(key) != value:
            raise ValueError(
                f"`{key}` ({_shown(value)}) differs from that of the checkpoint in {path} ({_shown(saved.get(key))}); "
                "continue with the value of the run that made it"
            )


def _shown(value: Any) -> str:
    return ", ".join(dict.fromkeys(str(v).rpartition(".")[2] for v in value)) if isinstance(value, list) else str(value)


def identity(model: nn.Module) -> dict[str, Any]:
    """Returns the settings that must match, by configuration key; for `model.path` a digest of the base weights. Empty
    without adapters. A collective."""
    if not has_adapters(model):
        return {}
    layers = [name.removesuffix(DOWN) for name, _ in model.named_parameters() if name.endswith(DOWN)]
    first = peft_layer(model, layers[0])
    return {
        "model.lora.rank": first.r[ADAPTER],
        "model.lora.alpha": float(first.lora_alpha[ADAPTER]),
        "model.lora.target_modules": layers,
        "model.path": _base_digest(model),
    }


def _base_digest(model: nn.Module) -> str:
    """Returns the sha256 of names and bit-pattern sums of the base weights; independent of the sharding."""
    base = {base_name(name): parameter for name, parameter in model.named_parameters() if not is_adapter(name)}
    mesh = next(parameter.device_mesh for parameter in base.values() if isinstance(parameter, DTensor))
    total = shard_sums(base.values()).to(mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group("shard"))
    return hashlib.sha256(json.dumps([list(base), total.tolist()]).encode()).hexdigest()
