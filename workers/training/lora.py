"""Adds low-rank adapters (LoRA) to the policy: peft's layers inside the model, sharded by FSDP like other parameters.

Only the adapters train. Engines, exports and checksums get merged weights, W + (alpha / rank) B A, under the base
model's names; the reference policy is the model with its adapters off. peft takes two seconds to import, so it is
imported only in runs with adapters.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dapo.config.actor import LoraConfig
from dapo.config.rules.model import ALL_LINEAR

ADAPTER = "default"  # peft's default adapter name
LINEAR = (nn.Linear, Conv1D)  # Conv1D: GPT-2's layer, whose weight is transposed
Gather = Callable[[Tensor], Tensor]  # a sharded parameter -> the full tensor; a collective

_BASE = ".base_layer."
DOWN, UP = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"  # suffixes of parameter names


def add_adapters(model: PreTrainedModel, cfg: LoraConfig) -> None:
    """Adds an adapter to each target of `cfg` and freezes everything else, in place, also on the meta device. The
    adapters are float32 for any base, and without values until `init_adapters`. Raises ValueError for a target that is
    the head or not a linear layer."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    peft_config = PeftConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,  # type: ignore[arg-type]  # peft only divides it by r
        target_modules=_targets(model, cfg),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        lora_dropout=0.0,  # log-probabilities must be those of the sampling policy
        bias="none",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(peft_config, model, ADAPTER)
    for name, module in model.named_modules():
        if is_adapter(f"{name}.weight"):
            module.to(torch.float32)  # master weights; peft uses the dtype of the base


def _targets(model: PreTrainedModel, cfg: LoraConfig) -> list[str]:
    """Returns the names of the layers that `model.lora.target_modules` selects."""
    head = model.get_output_embeddings()
    layers = [name for name, module in model.named_modules() if isinstance(module, LINEAR) and module is not head]
    if not layers:
        raise ValueError(
            f"`model.lora.target_modules` ({', '.join(cfg.target_modules)}): {type(model).__name__} has no linear "
            "layer other than its head; set `model.lora.rank=0`"
        )
    if ALL_LINEAR in cfg.target_modules:
        return layers
    chosen = {target: [n for n in layers if f".{n}".endswith(f".{target}")] for target in cfg.target_modules}
    unknown = [target for target, names in chosen.items() if not names]
    if unknown:
        there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
        raise ValueError(
            f"`model.lora.target_modules` ({', '.join(unknown)}) must name linear layers of {type(model).__name__} "
            f"other than its head and embedding: {there}, or {ALL_LINEAR}"
        )
    return [name for name in layers if any(name in names for names in chosen.values())]


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Initialises A like `nn.Linear` and B with zeros: the policy starts as the base model. Values depend on `seed` and
    the parameter's name only, not on the number of ranks."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            full = torch.zeros(parameter.shape)
            if name.endswith(DOWN):
                words = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(words[:8], "little"))
                nn.init.kaiming_uniform_(full, a=5**0.5, generator=generator)
            _fill(parameter, full)


def _fill(parameter: Tensor, full: Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        shard = distribute_tensor(full.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())
    else:
        parameter.copy_(full)


def is_adapter(name: str) -> bool:
    return name.endswith((DOWN, UP))


def has_adapters(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def base_name(name: str) -> str:
    """Returns the base model's name of a parameter that is not an adapter's."""
    return name.replace(_BASE, ".")


def merged(model: nn.Module, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the base model, full tensor) of every parameter, with the adapters merged into theirs."""
    parameters = dict(model.named_parameters())
    for name in parameters:
        if not is_adapter(name):  # hold no full tensor while the next one is gathered
            yield base_name(name), _whole(model, parameters, name, gather)


def _whole(model: nn.Module, parameters: dict[str, nn.Parameter], name: str, gather: Gather) -> Tensor:
    full = gather(parameters[name])
    layer = name.removesuffix(f"{_BASE}weight")
    if layer == name:
        return full
    up, down, adapted = gather(parameters[layer + UP]), gather(parameters[layer + DOWN]), peft_layer(model, layer)
    first, second = (down.T, up.T) if adapted.fan_in_fan_out else (up, down)
    return torch.addmm(full.float(), first, second, alpha=adapted.scaling[ADAPTER])


def peft_layer(model: nn.Module, name: str) -> Any:
    """Returns peft's layer around the linear layer `name`, with rank (`r`), `lora_alpha` and `scaling` per adapter."""
    return model.get_submodule(name)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Makes the model compute like the base model in the block. peft's own switch also clears `requires_grad` and
    restores it on the parameters that the modules show at the end: under FSDP these can be the gathered ones, and the
    shards would never train again."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class BasePolicy(nn.Module):
    """A policy with its adapters off, used as its own reference policy; call it without gradient."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *args: Any) -> Any:
        with adapters_off(self.policy):
            return self.policy(*args)
