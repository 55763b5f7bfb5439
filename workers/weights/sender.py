"""Sends weights from the actors: gathers bucket after bucket and hands it to a transport.

In: an iterator of full (name, tensor) pairs, advanced in lockstep by all actor ranks. Out: `Bucket`s in `model.dtype`,
each with a digest. Between two buckets nothing but the iterator and the transport's slots is held.
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
    """Runs one rank's half, for one kind of transport. Every rank calls `open` whenever other engines take part, and
    then `gather` for each bucket, in order."""

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
        """Plans the buckets. parameters: starts a new pass, in the order of `shapes`. dtype: in which tensors travel,
        torch's name.
        """
        self._parameters = parameters
        self._dtype_name, self._dtype = dtype, getattr(torch, dtype)
        self._rank, self._device = rank, device
        self._plans = plan_buckets(shapes, bucket_bytes=bucket_bytes, itemsize=self._dtype.itemsize)
        self._next = 0
        self._iterator: Iterator[tuple[str, Tensor]] = iter(())
        self._transport: Transport | None = None
        self._failure = ""  # of the transport, in this sync

    @property
    def num_buckets(self) -> int:
        """Returns how many buckets one sync takes."""
        return len(self._plans)

    def open(self, transport: str, address: str, timeout_s: float) -> Endpoint | None:
        """Makes this rank's end for the engines, in place of an earlier one; None where they need none. address: this
        node's."""
        capacity = max(plan.num_bytes for plan in self._plans)
        self._iterator = iter(())  # a pass that did not come to its end may hold a parameter
        if transport == "ipc" and isinstance(self._transport, MemoryTransport):
            self._transport.renew()
        else:
            self.close()
            self._transport = None  # two ends have twice the memory
            self._transport = make_transport(
                transport, capacity, rank=self._rank, device=self._device, address=address, timeout_s=timeout_s
            )
        return None if self._transport is None else self._transport.endpoint()

    def join(self, num_receivers: int) -> None:
        """Meets the engines' `num_receivers` processes, which open their ends at the same time. A failure is told with
        the first bucket."""
        self._failure = ""
        if self._transport is not None:
            self._try(lambda transport: transport.join(num_receivers))

    def close(self) -> None:
        """Lets go of the engines, from any thread, whatever this rank does meanwhile; `open` comes next."""
        if (transport := self._transport) is not None:
            transport.close()

    @torch.no_grad()
    def gather(self, index: int) -> Bucket | None:
        """Returns bucket `index`, on its way; None on all ranks but 0. A collective, which goes on to its end also when
        the transport fails.

        Raises:
            RuntimeError: another bucket is due, or the parameters are not those of the plan.
        """
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
            self._iterator = iter(())  # it would hold the last parameter until the next sync
        if self._rank != SENDER:
            return None
        return Bucket(index=index, plan=plan, dtype=self._dtype_name, digest=found, failure=self._failure)

    def _try(self, action: Callable[[Transport], T]) -> T | None:
        """Returns what the transport does; None where the rank has none, or it fails, now or before in this sync."""
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
