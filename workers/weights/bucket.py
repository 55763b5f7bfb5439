"""How a model's weights are cut into buckets: the one plan that both ends of the weight sync follow (DESIGN section 8).

In: the (Hugging Face name, shape) of every parameter, tied ones once. Out: buckets of at most
`weight_sync.bucket_bytes`, known before the first sync; a larger tensor travels alone. This module needs no torch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

BACKEND = "dapo_buckets"  # the name under which the receiver registers with vLLM
WORD_BYTES = 8  # the digest reads whole words


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in its bucket: elements from `start` on, row by row. Shape as in the Hugging Face model."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Element after the last one."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """tensors: in the order in which the actors gather them. num_bytes: with zeros up to a whole word."""

    tensors: tuple[TensorPlace, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One transfer. Made by actor rank 0 (`workers.weights.sender`), consumed by all of the engines' processes.

    index: its number in the plan. dtype: of all its tensors, torch's name. digest: see `workers.weights.digest`.
    content: what the transport adds: `ref`, a uint8 array in Ray's object store; nothing where both ends share memory
    or a process group.
    """

    index: int
    plan: BucketPlan
    dtype: str
    digest: str
    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where an actor rank hands buckets over. Made by `workers.weights.transport`, consumed by `workers.weight_sync`.

    capacity: bytes of the largest bucket. address, port: of the store where the process group meets, for `broadcast`.
    place, handles: the memory that the rank shares and where, for `ipc` (`workers.weights.memory`).
    """

    capacity: int
    address: str = ""
    port: int = 0
    place: str = ""
    handles: list[dict[str, Any]] = field(default_factory=list)


def plan_buckets(
    shapes: Iterable[tuple[str, Sequence[int]]], *, bucket_bytes: int, itemsize: int
) -> tuple[BucketPlan, ...]:
    """Buckets in the given order of tensors. itemsize: bytes per element."""
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
