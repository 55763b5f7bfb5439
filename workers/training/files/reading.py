"""Reads distributed checkpoints (DCP) without running code from them: DCP's own reader unpickles the metadata and
values that are not tensors, and a pickle can call any function."""

import io
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

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
    """A DCP reader that accepts only the classes of a checkpoint description in the metadata."""

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
