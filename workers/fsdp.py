"""FSDP2 around the policy: process group, loading, sharding, optimizer, and the ways back to full tensors and files.

In: the configuration and a rank. Out: a sharded `PackedPolicy` with float32 master weights; NCCL on GPU, gloo on CPU.
Every public function is a collective: all ranks call it in the same order (DESIGN section 7).
"""

import copy
import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from dapo.config import Config, ModelConfig
from workers.attention import PACKED_ATTENTION
from workers.mesh import Mesh
from workers.policy import PackedPolicy


def load_policy(cfg: Config, mesh: Mesh) -> PackedPolicy:
    """The model of `cfg.model.path`, sharded per decoder layer. Rank 0 reads the files; the others get its weights."""
    disable_progress_bar()
    model = _read_model(cfg.model) if mesh.rank == 0 else _empty_model(cfg.model)
    full = {name: parameter.detach() for name, parameter in model.named_parameters()}
    policy = PackedPolicy(model, cfg.rollout.temperature, entropy_gradient=cfg.algorithm.entropy_coeff != 0)
    policy.train()  # transformers checkpoints activations only in training mode
    if cfg.model.gradient_checkpointing != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _shard(policy, cfg, mesh)
    _broadcast(model, full, mesh)
    return policy


def load_reference(cfg: Config, mesh: Mesh) -> PackedPolicy:
    """The model of `cfg.model.path` once more, frozen and sharded alike: the reference policy of `algorithm.kl`."""
    return load_policy(cfg, mesh).requires_grad_(False).eval()


def _read_model(cfg: ModelConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        cfg.path,
        dtype=torch.float32,
        attn_implementation=PACKED_ATTENTION,
        trust_remote_code=cfg.trust_remote_code,
    )


def _empty_model(cfg: ModelConfig) -> PreTrainedModel:
    """The same module with memory that is never written: sharding touches only this rank's part of each parameter."""
    config = AutoConfig.from_pretrained(cfg.path, trust_remote_code=cfg.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION,
            trust_remote_code=cfg.trust_remote_code,
        )
    model.to_empty(device="cpu")
    model.tie_weights()
    return model


def _shard(policy: PackedPolicy, cfg: Config, mesh: Mesh) -> None:
    """`fully_shard` on each decoder layer and on the root, which holds embeddings, final norm and head."""
    layers = [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"`model.path` ({cfg.model.path}): {type(policy.model).__name__} has no decoder layers that transformers "
            "can checkpoint, and the actors shard these; choose another architecture"
        )
    dtype = getattr(torch, cfg.model.dtype)
    precision = MixedPrecisionPolicy(param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if cfg.actor.offload and mesh.device == "cuda" else OffloadPolicy()
    for layer in layers:
        fully_shard(
            layer,
            mesh=mesh.fsdp,
            reshard_after_forward=cfg.actor.reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
        )
    # The backward pass begins with the head: freeing the root after the forward pass would save nothing.
    fully_shard(policy, mesh=mesh.fsdp, reshard_after_forward=False, mp_policy=precision, offload_policy=offload)


@torch.no_grad()
def _broadcast(model: PreTrainedModel, full: dict[str, Tensor], mesh: Mesh) -> None:
    """Rank 0's full parameters into everyone's shards, one at a time, and its buffers into everyone's."""
    device = torch.device(mesh.device)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = full.pop(name).to(device) if mesh.rank == 0 else torch.empty(parameter.shape, device=device)
        dist.broadcast(whole, src=0)
        shard = distribute_tensor(whole, mesh.fsdp, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def build_optimizer(policy: PackedPolicy, cfg: Config) -> torch.optim.AdamW:
    """AdamW over the shards; the fused kernel exists on CPU and GPU."""
    optim = cfg.actor.optim
    beta1, beta2 = optim.betas
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=optim.lr,
        betas=(beta1, beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    # The state that AdamW would make in its first step. Without it torch.distributed.checkpoint makes one when it saves
    # or loads, by an empty step that the bias correction then counts.
    for parameter in policy.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def reshard(policy: PackedPolicy) -> None:
    """Free gathered parameters, so that the module shows its shards (needed after a forward pass without backward)."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_parameters(policy: PackedPolicy, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full float32 tensor on the mesh's device), one at a time; tied weights once."""
    reshard(policy)
    for name, parameter in policy.model.named_parameters():
        shard = parameter.detach().to(mesh.device)
        assert isinstance(shard, DTensor)
        yield name, shard.full_tensor()


def checksum(policy: PackedPolicy, mesh: Mesh) -> str:
    """sha256 over names and bytes of all full parameters; equal on all ranks."""
    digest = hashlib.sha256()
    for name, tensor in full_parameters(policy, mesh):
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def save_state(policy: PackedPolicy, optimizer: torch.optim.Optimizer, directory: str) -> None:
    """Model and optimizer as a distributed checkpoint (DCP), each rank its shards."""
    reshard(policy)
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)


def load_state(policy: PackedPolicy, optimizer: torch.optim.Optimizer, directory: str) -> None:
    """Read what `save_state` wrote, on any number of ranks."""
    reshard(policy)
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    set_state_dict(policy, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def export_hf(policy: PackedPolicy, mesh: Mesh, cfg: ModelConfig, directory: str) -> None:
    """Rank 0 writes configuration, tokenizer and safetensors in `model.dtype`, as transformers and vLLM load them."""
    dtype = getattr(torch, cfg.dtype)
    state = {}
    for name, tensor in full_parameters(policy, mesh):
        if mesh.rank == 0:
            state[name] = tensor.to("cpu", dtype)
    if mesh.rank == 0:
        policy.model.save_pretrained(directory, state_dict=state)
        config = copy.deepcopy(policy.model.config)
        config.dtype = dtype  # transformers wrote the type of the master weights
        config.save_pretrained(directory)
        AutoTokenizer.from_pretrained(cfg.path, trust_remote_code=cfg.trust_remote_code).save_pretrained(directory)
    dist.barrier()
