"""The weight store, for engines outside of the Ray cluster: a folder or an object storage (a URL of fsspec) of bucket
files. A file's name is the SHA-256 of its bytes, so that a bucket which does not change is neither written nor fetched
again, and a reader that knows the name needs no trust in the store. The names of a version come over the engine's
authenticated stream (`workers.engines.stream`).
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path

import fsspec
import torch
from safetensors import safe_open
from torch import Tensor

from dapo.workers.weights.bucket import Bucket

CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"[0-9a-f]{64}")


class WeightStore:
    """The writer's end. The store is one run's own: what no engine needs is deleted, whoever wrote it."""

    def __init__(self, url: str) -> None:
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._files.makedirs(self._root, exist_ok=True)

    def put(self, data: Tensor) -> str:
        """Writes a bucket [N] uint8 of the host unless it is there; returns its name."""
        view = data.numpy().data
        name = hashlib.sha256(view).hexdigest()
        path = f"{self._root}/{name}"
        if not self._files.exists(path) or self._files.size(path) != len(view):  # or its writer was killed
            with self._files.open(path, "wb") as file:
                file.write(view)
        return name

    def keep(self, names: Collection[str]) -> None:
        """Deletes all other buckets."""
        for path in self._files.ls(self._root, detail=False):
            name = path.rstrip("/").rpartition("/")[2]
            if _NAME.fullmatch(name) and name not in names:
                self._files.rm_file(path)


def path_of(bucket: Bucket, folder: Path) -> Path:
    if not _NAME.fullmatch(bucket.file):
        raise ValueError(f"weight bucket {bucket.index} has no SHA-256 but {bucket.file[:80]!r}")
    return folder / bucket.file


def make_from_model(model: str, bucket: Bucket, folder: Path) -> None:
    """Writes the bucket's file if the weights in a model's safetensors files are what it holds."""
    files: dict[str, Path] = {}
    for file in Path(model).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    data = torch.zeros(bucket.plan.num_bytes, dtype=torch.uint8)
    dtype = getattr(torch, bucket.dtype)
    elements = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
    for place in bucket.plan.tensors:
        if place.name not in files:
            return
        with safe_open(files[place.name], "pt") as opened:
            tensor = opened.get_tensor(place.name)
        if tuple(tensor.shape) != place.shape:
            return
        elements[place.start : place.stop].copy_(tensor.reshape(-1))
    if hashlib.sha256(data.numpy().data).hexdigest() == bucket.file:
        path_of(bucket, folder).write_bytes(data.numpy().data)


def fetch(url: str, bucket: Bucket, folder: Path) -> Path:
    """Returns the bucket's file in `folder`, after fetching it if it is not there. Raises ValueError if the store has
    other bytes, OSError if it has none."""
    path = path_of(bucket, folder)
    if path.exists():
        return path
    files, root = fsspec.core.url_to_fs(url)
    found, left = hashlib.sha256(), bucket.plan.num_bytes
    number, part = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(number, "wb") as out, files.open(f"{root}/{bucket.file}", "rb") as file:
            while left >= 0 and (chunk := file.read(CHUNK_BYTES)):
                found.update(chunk)
                out.write(chunk)
                left -= len(chunk)
        if left or found.hexdigest() != bucket.file:
            raise ValueError(f"weight bucket {bucket.index} in the store ({url}) has other bytes than its name says")
        Path(part).replace(path)
    finally:
        Path(part).unlink(missing_ok=True)
    return path
