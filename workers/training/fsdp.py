"""Shards the policy with FSDP2 (float32 master weights; NCCL on GPU, gloo on CPU): loading, optimizer, full tensors.
The public functions are collectives: all ranks call them in the same order."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dapo.config.derived import shares_gpus, truncates
from dapo.config.rules.model import architecture_problems, engine_window, heads_problems
from dapo.config.schema import Config
from dapo.workers.training.files.loading import load_buffers, load_parameters, meta_model, settle_frequencies
from dapo.workers.training.files.naming import FileNames
from dapo.workers.training.forward.attention import why_unpackable
from dapo.workers.training.forward.policy import PackedPolicy
from dapo.workers.training.forward.recompute import Compiled, checkpoint_activations
from dapo.workers.training.lora import (
    BasePolicy,
    add_adapters,
    base_name,
    has_adapters,
    init_adapters,
    is_adapter,
    merged,
)
from dapo.workers.training.mesh import Mesh


def load_policy(cfg: Config, mesh: Mesh) -> PackedPolicy:
    """Loads the model of `cfg.model.path`, sharded per layer, in float32; each rank reads its own rows of the files.
    Raises ValueError if the files do not hold this model (`workers.training.files.loading`)."""
    lora = cfg.model.lora
    policy = _on_meta(cfg, getattr(torch, cfg.model.dtype) if lora.rank else torch.float32)  # frozen: no master weights
    if lora.rank:
        add_adapters(policy.model, lora)
    policy.train()  # transformers checkpoints activations only in training mode
    if cfg.actor.compile:
        policy.compile_by(Compiled(), cfg.model.gradient_checkpointing)
    else:
        checkpoint_activations(policy.model, cfg.model.gradient_checkpointing)
    _shard(policy, cfg, mesh, offload=cfg.actor.offload == "host")
    _fill(policy, cfg, mesh, offload=cfg.actor.offload == "host")
    if lora.rank:
        init_adapters(policy.model, cfg.trainer.seed)
    return policy


def load_reference(cfg: Config, mesh: Mesh, policy: PackedPolicy) -> nn.Module:
    """Returns the reference policy of `algorithm.kl`: `policy` with adapters off or, without LoRA, a second copy of its
    model. It is used once per step: frozen, sharded alike, stored in the compute dtype, with a GPU in host memory."""
    if cfg.model.lora.rank:
        return BasePolicy(policy)
    offload = cfg.actor.offload == "host" or mesh.device == "cuda"
    reference = _on_meta(cfg, getattr(torch, cfg.model.dtype)).requires_grad_(False).eval()
    _shard(reference, cfg, mesh, offload=offload)
    _fill(reference, cfg, mesh, offload=offload)
    return reference


def _on_meta(cfg: Config, dtype: torch.dtype) -> PackedPolicy:
    model = meta_model(cfg.model, dtype)
    config = model.config.to_dict()
    if problems := [*heads_problems(cfg, config), *architecture_problems(cfg, config)]:
        raise ValueError(problems[0])  # for a hub name, which only the ranks look up
    if why := why_unpackable(model):
        raise ValueError(f"`model.path` ({cfg.model.path}): {type(model).__name__} {why}")
    return PackedPolicy(
        model,
        cfg.rollout.temperature,
        entropy_gradient=cfg.algorithm.entropy_coeff != 0,
        truncated=truncates(cfg.rollout),
        float32_logits=cfg.model.head_dtype == "float32",
    )


def _fill(policy: PackedPolicy, cfg: Config, mesh: Mesh, *, offload: bool) -> None:
    """Allocates the shards, on the host if they are offloaded, and loads their values."""
    policy.to_empty(device="cpu" if offload else mesh.device)
    policy.model.tie_weights()  # `to_empty` made two parameters of a tied one
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(mesh.device))
    load_buffers(policy.model, cfg.model.path)
    settle_frequencies(policy.model, engine_window(cfg))
    named = policy.model.named_parameters(remove_duplicate=False)
    stored = [(base_name(name), parameter) for name, parameter in named if not is_adapter(name)]
    load_parameters(stored, cfg.model.path, policy.model.base_model_prefix, FileNames(policy.model).parts)


def _shard(policy: PackedPolicy, cfg: Config, mesh: Mesh, *, offload: bool) -> None:
    """Shards each decoder layer, an embedding that is not tied, and the root, which holds norm and head."""
    layers = [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"`model.path` ({cfg.model.path}): {type(policy.model).__name__} has no decoder layers that transformers "
            "can checkpoint, and the actors shard these; choose another architecture"
        )
    dtype = getattr(torch, cfg.model.dtype)
    shared: dict[str, Any] = {
        "mesh": mesh.fsdp,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32
        ),
        # The GPU copies from pinned memory. On a CPU mesh offloading moves nothing, but takes the same path.
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device == "cuda") if offload else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, reshard_after_forward=cfg.actor.reshard_after_forward, **shared)
    embedding: nn.Module = policy.model.get_input_embeddings()
    if embedding.weight is not policy.model.get_output_embeddings().weight:
        # In one unit with the head, both would be gathered and both gradients reduced in float32 at the same time.
        unit = fully_shard(embedding, reshard_after_forward=cfg.actor.reshard_after_forward, **shared)
        unit.set_unshard_in_backward(False)  # the gradient of a lookup does not need the table
    # The backward pass begins with the head: freeing the root after the forward pass would save nothing.
    fully_shard(policy, reshard_after_forward=False, **shared)


def reshard(policy: nn.Module) -> None:
    """Frees gathered parameters, so that the module shows its shards (needed after a forward pass without backward)."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def release(policy: PackedPolicy, cfg: Config, mesh: Mesh) -> None:
    """Frees gathered parameters and, if the engines share the GPU, torch's memory cache. Called between phases."""
    reshard(policy)
    if mesh.device == "cuda" and shares_gpus(cfg):
        torch.cuda.empty_cache()


def full_parameters(
    policy: PackedPolicy, mesh: Mesh, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the files, full tensor on the mesh's device), one parameter at a time; tied weights once, LoRA
    merged. Gathered in `dtype`, as a smaller one halves the traffic; with adapters in float32."""
    reshard(policy)
    dtype = torch.float32 if has_adapters(policy.model) else dtype
    parts_of = FileNames(policy.model).parts
    for name, full in merged(policy.model, lambda parameter: gather(parameter, mesh, dtype)):
        for part in parts_of(name, full.shape):
            yield part.name, part.of(full)
        del full  # otherwise held while the next one is gathered


def gather(parameter: Tensor, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the full tensor of a sharded parameter on the mesh's device, converted to `dtype` before it is sent."""
    shard = parameter.detach().to(mesh.device, dtype)
    assert isinstance(shard, DTensor)
    return shard.full_tensor()


def full_shapes(model: PreTrainedModel) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (name in the files, shape) of what `full_parameters` will yield, without gathering anything."""
    named, parts_of = model.named_parameters(), FileNames(model).parts
    whole = [(base_name(name), parameter.shape) for name, parameter in named if not is_adapter(name)]
    return [(part.name, part.shape) for name, shape in whole for part in parts_of(name, shape)]


def check_copies(policy: PackedPolicy, mesh: Mesh) -> None:
    """Raises RuntimeError, on all ranks, if copies of the parameters (`actor.fsdp_size`) differ in any bit."""
    if mesh.num_copies == 1:
        return
    reshard(policy)
    own = shard_sums(parameter for _, parameter in policy.named_parameters())
    every = [torch.empty_like(own) for _ in range(mesh.world_size)]
    dist.all_gather(every, own)
    size = mesh.fsdp.size(-1)
    if drifted := [rank for rank, sums in enumerate(every) if not torch.equal(sums, every[rank % size])]:
        raise RuntimeError(
            f"the parameters of actor ranks {drifted} differ from those of the first copy: copies (`actor.fsdp_size`) "
            "have drifted apart, because memory or network are faulty; nothing was saved. Check these ranks' machines "
            "and go on from the last checkpoint"
        )


@torch.no_grad()
def shard_sums(parameters: Iterable[Tensor]) -> Tensor:
    """Returns the sum of the float32 bit patterns of each parameter's own shard, [P] int64 on the CPU. Changing any
    single element changes it; the shards of a parameter add up to the same sum for any sharding."""
    sums = []
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        sums.append(parameter.to_local().float().view(torch.int32).sum(dtype=torch.int64))
    return torch.stack(sums).cpu()
