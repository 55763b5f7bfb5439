"""Keeps the actors' state as files: distributed checkpoints to go on from, and exports that transformers and vLLM load.

In: the sharded policy, its optimizer, a directory that all ranks see. Every function is a collective: all ranks call it
in the same order.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME

from dapo.config.actor import ModelConfig
from workers.training.fsdp import check_copies, full_parameters, full_shapes, gather, reshard
from workers.training.loading import INDEX_FILE
from workers.training.lora import has_adapters
from workers.training.lora_files import check_identity, save_adapters, save_identity
from workers.training.mesh import Mesh
from workers.training.policy import PackedPolicy
from workers.training.unanimous import OwnWork, files_error

EXPORT_FILE_BYTES = 4 << 30
ADAPTER_FOLDER = "adapter"  # next to the model transformers would load the adapters a second time


def save_state(policy: PackedPolicy, optimizer: torch.optim.Optimizer, mesh: Mesh, directory: str) -> None:
    """Writes model and optimizer as a distributed checkpoint (DCP), each rank its shards; of the model what trains.

    Raises:
        RuntimeError: copies of the parameters have drifted apart; nothing is written then.
        FilesError: some rank could not write.
    """
    check_copies(policy, mesh)
    reshard(policy)
    model_state, optimizer_state = _states(policy, optimizer)
    try:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    except CheckpointException as error:
        raise files_error(f"{directory} could not be written", error) from None
    if has_adapters(policy.model):
        save_identity(policy.model, Path(directory))


def missing_shards(directory: str) -> list[str]:
    """Returns the files that a distributed checkpoint names in its `.metadata` and that are not there, or too short.

    Of a checkpoint that this run has written itself: its metadata is a pickle.
    """
    root = Path(directory)
    metadata = root / ".metadata"
    if not metadata.exists():
        return [metadata.name]
    ends: dict[str, int] = {}
    for place in dcp.FileSystemReader(directory).read_metadata().storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return sorted(
        name for name, end in ends.items() if not (root / name).is_file() or (root / name).stat().st_size < end
    )


def load_state(policy: PackedPolicy, optimizer: torch.optim.Optimizer, directory: str) -> None:
    """Reads what `save_state` wrote, on any number of ranks and copies.

    Of the optimizer only its moments and steps: `actor.optim` may have changed since. Raises FilesError if it is of
    other adapters, or cannot be read.
    """
    reshard(policy)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    check_identity(policy.model, Path(directory))
    model_state, optimizer_state = _states(policy, optimizer)
    try:
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    except CheckpointException as error:
        raise files_error(f"{directory} could not be loaded", error) from None
    options = StateDictOptions(strict=False)  # DCP has already missed what is not there
    set_state_dict(policy, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _states(policy: PackedPolicy, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state of the model, each trained parameter once, and of the optimizer; all else is `model.path`'s."""
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    return {name: value for name, value in model_state.items() if name in trained}, optimizer_state


def export_hf(policy: PackedPolicy, mesh: Mesh, cfg: ModelConfig, directory: str) -> None:
    """Writes, on rank 0, configuration, tokenizer and safetensors in `model.dtype`, as transformers and vLLM load them.

    LoRA is merged; in a folder of their own the adapters lie alone, for peft. Rank 0 holds one file's tensors at a
    time, at most `EXPORT_FILE_BYTES`, or one larger tensor more. Raises FilesError if it cannot write.
    """
    dtype, root = getattr(torch, cfg.dtype), Path(directory)
    shapes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in full_shapes(policy.model)}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=EXPORT_FILE_BYTES)
    held: dict[str, dict[str, Tensor]] = {}
    own = OwnWork()  # whatever becomes of it, rank 0 takes part in every gathering
    with own:
        if mesh.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
    for name, full in full_parameters(policy, mesh):
        if mesh.rank == 0 and not own.failed:
            file = split.tensor_to_filename[name]
            held.setdefault(file, {})[name] = full.to("cpu", dtype)
            if len(held[file]) == len(split.filename_to_tensors[file]):
                with own:
                    save_file(held.pop(file), root / file, metadata={"format": "pt"})
    with own:
        if mesh.rank == 0:
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                (root / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            _save_description(policy, cfg, root)
    own.meet(f"the model could not be exported to {directory}")
    if has_adapters(policy.model):
        save_adapters(policy.model, lambda parameter: gather(parameter, mesh), cfg.path, root / ADAPTER_FOLDER)


def _save_description(policy: PackedPolicy, cfg: ModelConfig, root: Path) -> None:
    """Writes what an export has besides its tensors."""
    config = copy.deepcopy(policy.model.config)
    config.dtype = getattr(torch, cfg.dtype)  # not that of the master weights
    config.architectures = [type(policy.model).__name__]
    config.save_pretrained(root)
    # Its `save_pretrained` refuses what it has let in, such as a temperature without `do_sample`.
    policy.model.generation_config.to_json_file(root / GENERATION_CONFIG_NAME)
    AutoTokenizer.from_pretrained(cfg.path, trust_remote_code=cfg.trust_remote_code).save_pretrained(root)
