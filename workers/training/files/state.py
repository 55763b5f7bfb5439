"""Saves and loads the actors' state: distributed checkpoints to resume from, and exports for transformers and vLLM.

    save_state, export_hf: write the current state straight to disk; updates wait
    take_snapshot ─▶ Snapshot in host memory ─▶ write_snapshot: write the same files in a thread during updates

The functions are collectives: all ranks call them in the same order, with a directory that all see. A rank hashes the
files it has written, for `dapo.state.manifest.seal`, which finds what the driver does not see.
"""

import copy
import io
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.serialization import StateDictSplit
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME

from dapo.config.actor import ModelConfig
from dapo.state.manifest import DIGESTS, leave_digests
from dapo.workers.training.collective_errors import FilesError, OwnWork, files_error
from dapo.workers.training.files.adapters import (
    IDENTITY_FILE,
    check_identity,
    gather_adapters,
    identity,
    save_adapter_config,
    save_identity,
)
from dapo.workers.training.files.loading import INDEX_FILE
from dapo.workers.training.forward.policy import PackedPolicy
from dapo.workers.training.fsdp import check_copies, full_parameters, full_shapes, gather, reshard
from dapo.workers.training.lora import has_adapters
from dapo.workers.training.mesh import Mesh
from dapo.workers.training.optimizer import LossScale

EXPORT_FILE_BYTES = 4 << 30
ADAPTER_FOLDER = "adapter"  # next to the model, transformers would apply the adapters again
ADAPTER_FILE = f"{ADAPTER_FOLDER}/adapter_model.safetensors"
SHARDS_OF = ".metadata"  # DCP's index of the shards
ExportFile = tuple[str, dict[str, Tensor]]  # name in the export, tensors on the CPU
_PARTS = (
    *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata"),
    *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_KNOWN = {
    *((metadata.__name__, name) for name in _PARTS),
    *((filesystem.__name__, "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),  # from Python 3.13 on
}


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_type and (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(
                f"its .metadata names {module}.{name}, which is no part of a checkpoint's description and may be a "
                "program; go on from a checkpoint that this program has written"
            )
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """A DCP reader that accepts only the classes of a checkpoint description in the metadata: DCP's own unpickles
    anything, and a pickle can call any function."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Raises UnpicklingError for any other content."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            found = _Metadata(file).load()
        if not isinstance(found, metadata.Metadata):
            raise pickle.UnpicklingError("its .metadata is no description of a checkpoint")
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class Planner(DefaultLoadPlanner):
    """A DCP planner that loads values which are not tensors, such as learning rates, with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises UnpicklingError for anything but plain values."""
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's part of a checkpoint, copied to host memory."""

    state: dict[str, Any]  # for DCP
    identity: dict[str, Any]  # of adapters, empty without
    export: tuple[list[ExportFile], StateDictSplit] | None  # files (on rank 0) and their index; None: no export


def save_state(
    policy: PackedPolicy, optimizer: torch.optim.Optimizer, scale: LossScale, mesh: Mesh, directory: str
) -> None:
    """Writes the trained parameters, optimizer and loss scale as a distributed checkpoint (DCP), each rank its shards.
    Raises RuntimeError, before writing, if copies of the parameters have drifted apart; FilesError if some rank could
    not write."""
    _write_state(*_state_of(policy, optimizer, scale, mesh), mesh, directory)


def take_snapshot(
    policy: PackedPolicy, optimizer: torch.optim.Optimizer, scale: LossScale, mesh: Mesh, *, export: torch.dtype | None
) -> Snapshot:
    """Returns copies of what `save_state` writes and, if `export` is a dtype, of what `export_hf` writes; updates do
    not change them. Raises RuntimeError as `save_state` does."""
    state, adapters = _state_of(policy, optimizer, scale, mesh)
    # It copies even tensors that are in host memory already. It keeps nothing for the next snapshot.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    copied = stager.stage(state)
    stager.close()
    assert isinstance(copied, dict)
    files = None
    if export is not None:
        split = _split(policy, export)
        files = (list(_export_files(policy, mesh, split, export)), split)
    return Snapshot(copied, adapters, files)


def write_snapshot(
    snapshot: Snapshot, policy: PackedPolicy, mesh: Mesh, cfg: ModelConfig, directory: str, export: str
) -> None:
    """Writes the checkpoint into `directory` and the export into `export`, as `save_state` and `export_hf` do. May run
    in a thread during updates: it reads no parameter and has its own process group. Raises FilesError if some rank
    could not write."""
    _write_state(snapshot.state, snapshot.identity, mesh, directory)
    if snapshot.export is not None:
        files, split = snapshot.export
        _write_export(iter(files), split, policy, mesh, cfg, Path(export))


def _state_of(
    policy: PackedPolicy, optimizer: torch.optim.Optimizer, scale: LossScale, mesh: Mesh
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the current state for DCP, which shares the policy's memory, and the identity of adapters."""
    check_copies(policy, mesh)
    reshard(policy)
    model_state, optimizer_state = _states(policy, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, **scale.state()}, identity(policy.model)


def _write_state(state: dict[str, Any], adapters: dict[str, Any], mesh: Mesh, directory: str) -> None:
    root, own = Path(directory), OwnWork(mesh.files)
    try:
        dcp.save(state, checkpoint_id=directory, process_group=mesh.files)
    except CheckpointException as error:
        raise files_error(f"{directory} could not be written", error) from None
    with own:
        if adapters and mesh.rank == 0:
            save_identity(adapters, root)
        written = list(root.glob(f"__{mesh.rank}_*.distcp"))  # as DCP names this rank's shards
        if mesh.rank == 0:
            written += [path for name in (SHARDS_OF, IDENTITY_FILE) if (path := root / name).exists()]
        leave_digests(written, f"rank_{mesh.rank:05d}")
    own.meet(f"{directory} could not be written")


def load_state(policy: PackedPolicy, optimizer: torch.optim.Optimizer, scale: LossScale, directory: str) -> None:
    """Reads a checkpoint of `save_state`, also one of another number of ranks and copies. Of the optimizer only moments
    and step counts are read: `actor.optim` may have changed since. A checkpoint of another `model.dtype`, which has no
    loss scale, leaves the current one. Raises FilesError if the checkpoint has other adapters or cannot be read."""
    reshard(policy)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    check_identity(policy.model, Path(directory))
    model_state, optimizer_state = _states(policy, optimizer)
    scale_state = scale.state()
    try:
        if scale_state:
            saved = Reader(directory).read_metadata().state_dict_metadata
            scale_state = {key: value for key, value in scale_state.items() if key in saved}
        state = {"model": model_state, "optimizer": optimizer_state, **scale_state}
        dcp.load(state, storage_reader=Reader(directory), planner=Planner())
    except CheckpointException as error:
        raise files_error(f"{directory} could not be loaded", error) from None
    except (OSError, pickle.UnpicklingError) as error:  # from its metadata, on every rank
        raise FilesError(f"{directory} could not be loaded: {type(error).__name__}: {error}") from None
    options = StateDictOptions(strict=False)  # DCP has already reported missing values
    set_state_dict(policy, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    if scale_state:
        scale.load(scale_state)


def own_tensors(policy: PackedPolicy, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns this rank's shards of what `save_state` writes, without the loss scale. They share memory with policy and
    optimizer."""
    reshard(policy)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    states = [optimizer.state[parameter] for parameter in trained]
    every = (*trained, *(state[name] for state in states for name in sorted(state)))
    return [each.to_local() if isinstance(each, DTensor) else each for each in (value.detach() for value in every)]


def _states(policy: PackedPolicy, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the states of the trained parameters, each once, and of the optimizer."""
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    return {name: value for name, value in model_state.items() if name in trained}, optimizer_state


def export_hf(policy: PackedPolicy, mesh: Mesh, cfg: ModelConfig, directory: str) -> None:
    """Writes, on rank 0, configuration, tokenizer and safetensors in `model.dtype`, for transformers and vLLM. LoRA
    adapters are merged, and also written to a separate folder, for peft. Rank 0 holds the tensors of one file at a
    time, at most `EXPORT_FILE_BYTES` or a single larger tensor. Raises FilesError if it cannot write."""
    dtype = getattr(torch, cfg.dtype)
    split = _split(policy, dtype)
    _write_export(_export_files(policy, mesh, split, dtype), split, policy, mesh, cfg, Path(directory))


def _split(policy: PackedPolicy, dtype: torch.dtype) -> StateDictSplit:
    """Assigns each tensor of an export to a file."""
    shapes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in full_shapes(policy.model)}
    return split_torch_state_dict_into_shards(shapes, max_shard_size=EXPORT_FILE_BYTES)


def _export_files(policy: PackedPolicy, mesh: Mesh, split: StateDictSplit, dtype: torch.dtype) -> Iterator[ExportFile]:
    """Yields, on rank 0, one file after the other, whose tensors share no memory with the policy. The other ranks only
    take part in gathering. A collective."""
    held: dict[str, dict[str, Tensor]] = {}
    for name, full in full_parameters(policy, mesh, dtype):
        if mesh.rank == 0:
            file = split.tensor_to_filename[name]
            held.setdefault(file, {})[name] = full.to("cpu", dtype, copy=True)
            if len(held[file]) == len(split.filename_to_tensors[file]):
                yield file, held.pop(file)
    if has_adapters(policy.model):
        adapters = gather_adapters(policy.model, lambda parameter: gather(parameter, mesh))
        if mesh.rank == 0:
            yield ADAPTER_FILE, adapters


def _write_export(
    files: Iterator[ExportFile], split: StateDictSplit, policy: PackedPolicy, mesh: Mesh, cfg: ModelConfig, root: Path
) -> None:
    """Writes the files of `_export_files` and all other files of an export, on rank 0."""
    own, with_adapters = OwnWork(mesh.files), False
    with own:
        if mesh.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
    for name, tensors in files:  # continue after an error: rank 0 must take part in every gather
        with own:
            if not own.failed:
                with_adapters = name == ADAPTER_FILE
                (root / name).parent.mkdir(exist_ok=True)
                save_file(tensors, root / name, metadata={"format": "pt"})
    with own:
        if mesh.rank == 0 and not own.failed:
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                (root / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            if with_adapters:
                save_adapter_config(policy.model, cfg.path, root / ADAPTER_FOLDER)
            _save_description(policy, cfg, root)
            leave_digests([path for path in root.rglob("*") if path.is_file() and not path.match(DIGESTS)], "export")
    own.meet(f"the model could not be exported to {root}")


def _save_description(policy: PackedPolicy, cfg: ModelConfig, root: Path) -> None:
    config = copy.deepcopy(policy.model.config)
    config.dtype = getattr(torch, cfg.dtype)  # not the dtype of the master weights
    config.architectures = [type(policy.model).__name__]
    config.save_pretrained(root)
    # `save_pretrained` rejects values that loading accepts, such as a temperature without `do_sample`.
    policy.model.generation_config.to_json_file(root / GENERATION_CONFIG_NAME)
    AutoTokenizer.from_pretrained(cfg.path, trust_remote_code=cfg.trust_remote_code).save_pretrained(root)
