"""FSDP2 around the policy: loading, sharding, optimizer, and the way back to full tensors.

In: the configuration and the ranks' mesh. Out: a sharded `PackedPolicy` with float32 master weights; NCCL on GPU, gloo
on CPU.
Every public function is a collective: all ranks call it in the same order (DESIGN section 7).
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from dapo.config.model_checks import architecture_problems, heads_problems
from dapo.config.schema import Config
from workers.training.loading import load_buffers, load_parameters, meta_model
from workers.training.lora import BasePolicy, add_adapters, base_name, has_adapters, init_adapters, is_adapter, merged
from workers.training.mesh import Mesh
from workers.training.policy import PackedPolicy
from workers.training.recompute import checkpoint_activations


def load_policy(cfg: Config, mesh: Mesh) -> PackedPolicy:
    """The model of `cfg.model.path`, sharded per decoder layer, in float32. Each rank reads its own rows of the files.

    Raises ValueError where the files do not hold this model (`workers.training.loading`).
    """
    lora = cfg.model.lora
    policy = _on_meta(cfg, getattr(torch, cfg.model.dtype) if lora.rank else torch.float32)  # frozen: no master weights
    if lora.rank:
        add_adapters(policy.model, lora)
    policy.train()  # transformers checkpoints activations only in training mode
    checkpoint_activations(policy.model, cfg.model.gradient_checkpointing)
    _shard(policy, cfg, mesh, offload=cfg.actor.offload)
    _fill(policy, cfg.model.path, mesh, offload=cfg.actor.offload)
    if lora.rank:
        init_adapters(policy.model, cfg.trainer.seed)
    return policy


def load_reference(cfg: Config, mesh: Mesh, policy: PackedPolicy) -> nn.Module:
    """The reference policy of `algorithm.kl`: `policy` with its adapters off or, without LoRA, its model once more.

    It is used once per step: frozen, sharded alike, stored in the compute type, on a GPU in host memory.
    """
    if cfg.model.lora.rank:
        return BasePolicy(policy)
    offload = cfg.actor.offload or mesh.device == "cuda"
    reference = _on_meta(cfg, getattr(torch, cfg.model.dtype)).requires_grad_(False).eval()
    _shard(reference, cfg, mesh, offload=offload)
    _fill(reference, cfg.model.path, mesh, offload=offload)
    return reference


def _on_meta(cfg: Config, dtype: torch.dtype) -> PackedPolicy:
    model = meta_model(cfg.model, dtype)
    config = model.config.to_dict()
    if problems := [*heads_problems(cfg, config), *architecture_problems(cfg, config)]:
        raise ValueError(problems[0])  # of a hub name, which only the ranks look up
    return PackedPolicy(model, cfg.rollout.temperature, entropy_gradient=cfg.algorithm.entropy_coeff != 0)


def _fill(policy: PackedPolicy, path: str, mesh: Mesh, *, offload: bool) -> None:
    """Memory for the shards, on the host where they are offloaded, and their values."""
    policy.to_empty(device="cpu" if offload else mesh.device)
    policy.model.tie_weights()  # `to_empty` made two parameters of a tied one
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(mesh.device))
    load_buffers(policy.model, path)
    named = policy.model.named_parameters(remove_duplicate=False)
    stored = [(base_name(name), parameter) for name, parameter in named if not is_adapter(name)]
    load_parameters(stored, path, policy.model.base_model_prefix)


def _shard(policy: PackedPolicy, cfg: Config, mesh: Mesh, *, offload: bool) -> None:
    """`fully_shard` on each decoder layer, an embedding that is not tied, and the root, which holds norm and head."""
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
        # Pinned memory is the GPU's to copy from; on a CPU mesh offloading moves nothing, but takes the same path.
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device == "cuda") if offload else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, reshard_after_forward=cfg.actor.reshard_after_forward, **shared)
    embedding: nn.Module = policy.model.get_input_embeddings()
    if embedding.weight is not policy.model.get_output_embeddings().weight:
        # With the head in one unit both would be gathered, and both gradients reduced in float32, at the same time.
        unit = fully_shard(embedding, reshard_after_forward=cfg.actor.reshard_after_forward, **shared)
        unit.set_unshard_in_backward(False)  # a look-up's gradient does not need its table
    # The backward pass begins with the head: freeing the root after the forward pass would save nothing.
    fully_shard(policy, reshard_after_forward=False, **shared)


def build_optimizer(policy: PackedPolicy, cfg: Config) -> torch.optim.AdamW:
    """AdamW over the shards that train; the fused kernel exists on CPU and GPU."""
    optim = cfg.actor.optim
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    beta1, beta2 = optim.betas
    optimizer = torch.optim.AdamW(
        trained,
        lr=optim.lr,
        betas=(beta1, beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    # The state that AdamW would make in its first step. Without it torch.distributed.checkpoint makes one when it saves
    # or loads, by an empty step that the bias correction then counts.
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def reshard(policy: nn.Module) -> None:
    """Free gathered parameters, so that the module shows its shards (needed after a forward pass without backward)."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def release(policy: PackedPolicy, cfg: Config, mesh: Mesh) -> None:
    """Between phases: free gathered parameters and, where the engines share the GPU, what torch keeps for later."""
    reshard(policy)
    if mesh.device == "cuda" and cfg.trainer.colocate:
        torch.cuda.empty_cache()


def full_parameters(
    policy: PackedPolicy, mesh: Mesh, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor on the mesh's device), one at a time; tied weights once, LoRA merged.

    Gathered in `dtype`: a short one halves what travels. Adapters and what they are merged into stay float32.
    """
    reshard(policy)
    dtype = torch.float32 if has_adapters(policy.model) else dtype
    yield from merged(policy.model, lambda parameter: gather(parameter, mesh, dtype))


def gather(parameter: Tensor, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Tensor:
    """A sharded parameter -> the full tensor on the mesh's device, converted to `dtype` before it travels."""
    shard = parameter.detach().to(mesh.device, dtype)
    assert isinstance(shard, DTensor)
    return shard.full_tensor()


def checksum(policy: PackedPolicy, mesh: Mesh) -> str:
    """sha256 over names and bytes of all full parameters. Raises RuntimeError unless it is equal on all ranks."""
    digest = hashlib.sha256()
    for name, tensor in full_parameters(policy, mesh):
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(mesh.world_size)]
    dist.all_gather(every, own)
    if different := [rank for rank, other in enumerate(every) if not torch.equal(other, every[0])]:
        raise RuntimeError(
            f"the parameters of actor ranks {different} are no longer those of rank 0: copies (`actor.fsdp_size`) have "
            "drifted apart, or memory or network are faulty; go back to an earlier checkpoint"
        )
    return digest.hexdigest()
