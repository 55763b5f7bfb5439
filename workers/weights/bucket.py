"""Splits a model's weights into buckets by one plan that both ends of the weight sync follow, and computes digests.

The plan is made from (Hugging Face name, shape) of every parameter, tied ones once, before the first sync. Buckets have
at most `weight_sync.bucket_bytes`; a larger tensor has its own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BACKEND = "dapo_buckets"  # name of the receiver's backend in vLLM
STORE = "store"  # name of the transport to engines outside of the Ray cluster
WORD_BYTES = 8  # the digest reads whole words
_WORDS_PER_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 21}  # two buffers fit the cache of a core, or (16 MiB each) of a GPU


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Position of a tensor in its bucket: row-major elements from `start` on. `shape` is the Hugging Face model's."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Content of a bucket."""

    tensors: tuple[TensorPlace, ...]  # in the order in which the actors gather them
    num_bytes: int  # zero-padded to a whole word


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One transfer. Made by actor rank 0 (`workers.weights.sender`), consumed by all of the engines' processes."""

    index: int  # in the plan
    plan: BucketPlan
    dtype: str  # of all its tensors, torch's name
    digest: str  # of its bytes, by `digest`
    failure: str = ""  # why sending failed; gathering continued, so that all ranks stay in step
    file: str = ""  # `store`: its name there (`workers.weights.store`), and its path where an engine loads it


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where an actor rank hands over buckets. Made by `transport`, consumed by `workers.weight_sync`."""

    capacity: int  # bytes of the largest bucket
    address: str = ""  # `broadcast`: address and port of the store where the process group meets
    port: int = 0
    place: str = ""  # `ipc`: where the shared memory is (`workers.weights.memory`)
    handles: list[list[dict[str, Any]]] = field(default_factory=list)  # `ipc`: of the slots, for each engine there


def plan_buckets(
    shapes: Iterable[tuple[str, Sequence[int]]], *, bucket_bytes: int, itemsize: int
) -> tuple[BucketPlan, ...]:
    """Returns buckets in the given order of tensors. itemsize: bytes per element."""
    plans: list[BucketPlan] = []
    places: list[TensorPlace] = []
    start = 0
    for name, shape in shapes:
        place = TensorPlace(name, tuple(shape), start)
        if places and place.stop * itemsize > bucket_bytes:
            plans.append(_finished(places, start, itemsize))
            places, place = [], TensorPlace(name, tuple(shape), 0)
        places.append(place)
        start = place.stop
    if places:
        plans.append(_finished(places, start, itemsize))
    return tuple(plans)


def _finished(places: list[TensorPlace], num_elements: int, itemsize: int) -> BucketPlan:
    words = -(-num_elements * itemsize // WORD_BYTES)
    return BucketPlan(tuple(places), words * WORD_BYTES)


def _signed(value: int) -> int:
    """Returns the int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


# Constants of SplitMix64 (Steele, Lea and Flood). They are odd: multiplication by them modulo 2^64 is invertible.
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


@torch.no_grad()
def digest(data: Tensor) -> str:
    """Returns 16 hexadecimal digits, equal on every device: the sum modulo 2^64 of a hash of each word and its
    position.

    data: [N] uint8, contiguous, N a multiple of 8; on a GPU it is read there, without a copy to the host. The digest
    detects errors of programs and hardware, not forgeries: changing one word always changes it; other changes (swapped
    words or tensors, shifts) are missed with a chance of about 2^-64.
    """
    words = data.view(torch.int64)
    chunk = min(_WORDS_PER_CHUNK[data.device.type], max(1, len(words)))
    keys = torch.arange(chunk, dtype=torch.int64, device=data.device) * _signed(_STEP)
    scratch = torch.empty_like(keys)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk]
        mixed = torch.add(part, keys[: len(part)], out=scratch[: len(part)])
        mixed.add_(_signed(start * _STEP))
        halves = mixed.view(torch.int32).view(-1, 2)  # lower half first: all our machines are little-endian
        for factor in (_FIRST, _SECOND):
            mixed.mul_(factor)
            halves[:, 0] ^= halves[:, 1]
        total += mixed.sum()
    return f"{int(total) & ((1 << 64) - 1):016x}"
