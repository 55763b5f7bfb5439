"""The actors' state as files: distributed checkpoints to go on from, and exports that transformers and vLLM load.

In: the sharded policy, its optimizer, a directory that all ranks see. Every function is a collective: all ranks call it
in the same order (DESIGN sections 7 and 9).
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME

from dapo.config.actor import ModelConfig
from workers.training.fsdp import full_parameters, gather, reshard
from workers.training.loading import INDEX_FILE, SINGLE_FILE
from workers.training.lora import has_adapters
from workers.training.lora_files import check_identity, save_adapters, save_identity
from workers.training.mesh import Mesh
from workers.training.policy import PackedPolicy

EXPORT_FILE_BYTES = 4 << 30
ADAPTER_FOLDER = "adapter"  # beside the model transformers would load the adapters a second time


def save_state(policy: PackedPolicy, optimizer: torch.optim.Optimizer, directory: str) -> None:
    """Model and optimizer as a distributed checkpoint (DCP), each rank its shards; of the model only what trains."""
    reshard(policy)
    model_state, optimizer_state = _states(policy, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    if has_adapters(policy.model):
        save_identity(policy.model, Path(directory))


def load_state(policy: PackedPolicy, optimizer: torch.optim.Optimizer, directory: str) -> None:
    """Read what `save_state` wrote, on any number of ranks and copies. Raises ValueError if it is of other adapters.

    Of the optimizer only its moments and steps: `actor.optim` may have changed since.
    """
    reshard(policy)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    check_identity(policy.model, Path(directory))
    model_state, optimizer_state = _states(policy, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    options = StateDictOptions(strict=False)  # DCP has already missed what is not there
    set_state_dict(policy, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _states(policy: PackedPolicy, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the model, each trained parameter once, and of the optimizer. All else comes from `model.path` again."""
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    return {name: value for name, value in model_state.items() if name in trained}, optimizer_state


def export_hf(policy: PackedPolicy, mesh: Mesh, cfg: ModelConfig, directory: str) -> None:
    """Rank 0 writes configuration, tokenizer and safetensors in `model.dtype`, as transformers and vLLM load them.

    LoRA is merged; in a folder of their own the adapters lie alone, for peft. It holds one file's tensors at a time,
    at most `EXPORT_FILE_BYTES` or one tensor.
    """
    dtype, root = getattr(torch, cfg.dtype), Path(directory)
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0
    if mesh.rank == 0:
        root.mkdir(parents=True, exist_ok=True)
    for name, full in full_parameters(policy, mesh):
        if mesh.rank == 0:
            tensor = full.to("cpu", dtype)
            if held and tensor.nbytes + sum(t.nbytes for t in held.values()) > EXPORT_FILE_BYTES:
                files.append(_write(held, root, len(files)))
                held = {}
            held[name] = tensor
            total += tensor.nbytes
    if mesh.rank == 0:
        files.append(_write(held, root, len(files)))
        _name_files(files, root, total)
        config = copy.deepcopy(policy.model.config)
        config.dtype = dtype  # not that of the master weights
        config.architectures = [type(policy.model).__name__]
        config.save_pretrained(root)
        # Its `save_pretrained` refuses what it has let in, such as a temperature without `do_sample`.
        policy.model.generation_config.to_json_file(root / GENERATION_CONFIG_NAME)
        AutoTokenizer.from_pretrained(cfg.path, trust_remote_code=cfg.trust_remote_code).save_pretrained(root)
    if has_adapters(policy.model):
        save_adapters(policy.model, lambda parameter: gather(parameter, mesh), cfg.path, root / ADAPTER_FOLDER)
    dist.barrier()


def _write(tensors: dict[str, Tensor], root: Path, number: int) -> list[str]:
    save_file(tensors, _draft(root, number), metadata={"format": "pt"})
    return list(tensors)


def _draft(root: Path, number: int) -> Path:
    """Until it is known how many there will be."""
    return root / f"part-{number}.safetensors"


def _name_files(files: list[list[str]], root: Path, total_bytes: int) -> None:
    """The names that transformers looks for; several files get an index."""
    if len(files) == 1:
        _draft(root, 0).rename(root / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        _draft(root, number).rename(root / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (root / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
