"""Weights from the actors to the engines: the sender's half and the driver's (DESIGN section 8).

In: an iterator of full (name, tensor) pairs, gathered in lockstep by all actor ranks. Out: safetensors buckets of at
most `weight_sync.bucket_bytes` in Ray's object store, each with a digest; `workers.weight_receiver` is the other end.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray

from dapo.config import WeightSyncConfig

if TYPE_CHECKING:
    import torch

BACKEND = "dapo_buckets"  # the name under which the receiver registers with vLLM


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One transfer. Made by actor rank 0, consumed by `workers.rollout`. ref: uint8 array, a safetensors image."""

    ref: Any
    digest: str
    num_bytes: int


def digest(data: memoryview | bytes) -> str:
    """Digest of one bucket; both ends compute it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def iter_buckets(
    parameters: "Iterator[tuple[str, torch.Tensor]]", bucket_bytes: int
) -> "Iterator[dict[str, torch.Tensor]]":
    """Groups full tensors into dictionaries of at most `bucket_bytes`; a larger tensor travels alone."""
    bucket: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in parameters:
        size = tensor.numel() * tensor.element_size()
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = {}, 0
        bucket[name] = tensor
        filled += size
    if bucket:
        yield bucket


def export_buckets(
    parameters: "Iterator[tuple[str, torch.Tensor]]", bucket_bytes: int, *, is_sender: bool
) -> list[Bucket]:
    """Runs on every actor rank, because gathering is a collective; only the sender puts buckets into the store."""
    from safetensors.torch import save

    buckets = []
    for tensors in iter_buckets(parameters, bucket_bytes):
        if not is_sender:
            continue
        image = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        array = np.frombuffer(image, dtype=np.uint8)
        buckets.append(Bucket(ref=ray.put(array), digest=digest(image), num_bytes=len(image)))
    return buckets


class WeightSource(Protocol):
    """What the sync needs of `workers.actor.ActorPool`."""

    async def export_weights(self) -> list[Bucket]: ...


class WeightSink(Protocol):
    """What the sync needs of `workers.rollout.RolloutPool`."""

    async def receive_weights(self, version: int, buckets: list[Bucket], timeout_s: float) -> None: ...


class WeightSync:
    """The driver's half: after each update the engines hold exactly the actors' weights."""

    def __init__(self, actors: WeightSource, rollouts: WeightSink, cfg: WeightSyncConfig) -> None:
        self._actors = actors
        self._rollouts = rollouts
        self._cfg = cfg

    async def __call__(self, version: int) -> None:
        """All engines serve `version` when this returns.

        Raises:
            RemoteError: a bucket's digest differs, a parameter stayed stale, or the deadline passed.
        """
        buckets = await self._actors.export_weights()
        await self._rollouts.receive_weights(version, buckets, self._cfg.timeout_s)
