"""Sends weights from the actors: gathers bucket after bucket and hands each to a transport.

All actor ranks advance an iterator of full (name, tensor) pairs in lockstep. Between two buckets only the iterator and
the transport's slots hold memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from workers.weights.bucket import Bucket, BucketPlan, Endpoint, digest, plan_buckets
from workers.weights.group import SENDER
from workers.weights.transport import MemoryTransport, Transport, make_transport

T = TypeVar("T")


class WeightSender:
    """One rank's half of the weight sync, for one kind of transport. Every rank calls `open` whenever the set of
    engines changes, then `gather` for each bucket in order."""

    def __init__(
        self,
        parameters: Callable[[], Iterator[tuple[str, Tensor]]],
        shapes: Iterable[tuple[str, Sequence[int]]],
        *,
        dtype: str,
        bucket_bytes: int,
        rank: int,
        device: torch.device,
    ) -> None:
        """parameters: starts a new pass, in the order of `shapes`. dtype: of the sent tensors, torch's name."""
        self._parameters = parameters
        self._dtype_name, self._dtype = dtype, getattr(torch, dtype)
        self._rank, self._device = rank, device
        self._plans = plan_buckets(shapes, bucket_bytes=bucket_bytes, itemsize=self._dtype.itemsize)
        self._next = 0
        self._iterator: Iterator[tuple[str, Tensor]] = iter(())
        self._transport: Transport | None = None
        self._failure = ""  # of the transport in this sync

    @property
    def num_buckets(self) -> int:
        return len(self._plans)

    def open(self, transport: str, address: str, timeout_s: float) -> Endpoint | None:
        """Creates this rank's end for the engines, replacing an earlier one; returns None if they need none. address:
        of this node."""
        capacity = max(plan.num_bytes for plan in self._plans)
        self._iterator = iter(())  # an unfinished pass may hold a parameter
        if transport == "ipc" and isinstance(self._transport, MemoryTransport):
            self._transport.renew()
        else:
            self.close()
            self._transport = None  # free the old one first: two need twice the memory
            self._transport = make_transport(
                transport, capacity, rank=self._rank, device=self._device, address=address, timeout_s=timeout_s
            )
        return None if self._transport is None else self._transport.endpoint()

    def join(self, num_receivers: int) -> None:
        """Connects to the engines' `num_receivers` processes, which open their ends at the same time. A failure is
        reported with the first bucket."""
        self._failure = ""
        if self._transport is not None:
            self._try(lambda transport: transport.join(num_receivers))

    def close(self) -> None:
        """Drops the connection to the engines, from any thread, also while this rank is busy. Next is `open`."""
        if (transport := self._transport) is not None:
            transport.close()

    @torch.no_grad()
    def gather(self, index: int) -> Bucket | None:
        """Returns bucket `index`, whose transfer has started; None on all ranks but 0. A collective, which completes
        also if the transport fails. Raises RuntimeError if another bucket is due or the parameters do not match the
        plan."""
        if index == 0:
            self._iterator, self._next = self._parameters(), 0
        if index != self._next:
            raise RuntimeError(f"asked for weight bucket {index}, but {self._next} is due; start again from 0")
        plan, self._next = self._plans[index], index + 1
        slot = self._try(lambda transport: transport.slot(index))
        found = ""
        if slot is None:
            for place in plan.tensors:
                self._take(place.name, place.shape)
        else:
            bucket = slot[: plan.num_bytes]
            self._fill(bucket, plan)
            found = digest(bucket) if self._rank == SENDER else ""
            self._try(lambda transport: transport.send(index, bucket))
        if self._next == len(self._plans):
            self._iterator = iter(())  # otherwise it holds the last parameter until the next sync
        if self._rank != SENDER:
            return None
        return Bucket(index=index, plan=plan, dtype=self._dtype_name, digest=found, failure=self._failure)

    def _try(self, action: Callable[[Transport], T]) -> T | None:
        """Returns the result of `action`; None without a transport, or if it failed now or before in this sync."""
        if self._transport is None or self._failure:
            return None
        try:
            return action(self._transport)
        except RuntimeError as error:  # of gloo, NCCL and their store alike
            self._failure = f"{type(error).__name__}: {error}"
            return None

    def _fill(self, bucket: Tensor, plan: BucketPlan) -> None:
        stop = plan.tensors[-1].stop * self._dtype.itemsize
        elements = bucket[:stop].view(self._dtype)
        for place in plan.tensors:
            elements[place.start : place.stop].copy_(self._take(place.name, place.shape).reshape(-1))
        bucket[stop:].zero_()

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found, tensor = next(self._iterator, ("nothing", torch.empty(0)))
        if (found, tuple(tensor.shape)) != (name, shape):
            raise RuntimeError(
                f"the weight sync expected {name} {list(shape)}, and the actors gathered {found} {list(tensor.shape)}"
            )
        return tensor
