"""The actors' half of the weight sync: gathers bucket after bucket and hands it to a transport (DESIGN section 8).

In: an iterator of full (name, tensor) pairs, advanced in lockstep by all actor ranks. Out: `Bucket`s in `model.dtype`,
each with a digest. Between two buckets nothing but the iterator and the transport's slots is held.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from workers.training.lora import base_name, is_adapter
from workers.weights.bucket import Bucket, BucketPlan, Endpoint, plan_buckets
from workers.weights.digest import digest
from workers.weights.group import SENDER
from workers.weights.transport import make_transport


def full_shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of what `fsdp.full_parameters` will yield, without gathering anything."""
    return [
        (base_name(name), tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if not is_adapter(name)
    ]


class WeightSender:
    """One rank's half. Every rank calls `open` once and then `gather` for each bucket of each sync, in order."""

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
        """parameters: starts a new pass, in the order of `shapes`. dtype: in which tensors travel, torch's name."""
        self._parameters = parameters
        self._dtype_name, self._dtype = dtype, getattr(torch, dtype)
        self._rank, self._device = rank, device
        self._plans = plan_buckets(shapes, bucket_bytes=bucket_bytes, itemsize=self._dtype.itemsize)
        self._next = 0

    @property
    def num_buckets(self) -> int:
        """Of one sync."""
        return len(self._plans)

    def open(self, transport: str, address: str, timeout_s: float) -> Endpoint | None:
        """This rank's end for the engines; None where they need none. address: this node's, for others to find."""
        capacity = max(plan.num_bytes for plan in self._plans)
        self._transport = make_transport(
            transport, capacity, rank=self._rank, device=self._device, address=address, timeout_s=timeout_s
        )
        return None if self._transport is None else self._transport.endpoint()

    def join(self, num_receivers: int) -> None:
        """Meets the engines' `num_receivers` processes, which open their ends at the same time."""
        if self._transport is not None:
            self._transport.join(num_receivers)

    @torch.no_grad()
    def gather(self, index: int) -> Bucket | None:
        """Bucket `index`, on its way; a collective. None on all ranks but 0.

        Raises:
            RuntimeError: another bucket is due, or the parameters are not those of the plan.
        """
        if index == 0:
            self._iterator, self._next = self._parameters(), 0
        if index != self._next:
            raise RuntimeError(f"asked for weight bucket {index}, but {self._next} is due; start again from 0")
        plan, self._next = self._plans[index], index + 1
        if self._transport is None:
            for place in plan.tensors:
                self._take(place.name, place.shape)
            return None
        bucket = self._transport.slot(index)[: plan.num_bytes]
        self._fill(bucket, plan)
        found = digest(bucket) if self._rank == SENDER else ""
        content = self._transport.send(index, bucket)
        if self._rank != SENDER:
            return None
        return Bucket(index=index, plan=plan, dtype=self._dtype_name, digest=found, content=content)

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
