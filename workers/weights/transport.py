"""Carries buckets from an actor rank to the engines: the sender's end of each transport. A transport has slots, memory
in which buckets are built in turn. At most two buckets exist at a time: one that the engines load, and the next."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from workers.rendezvous import serve_store
from workers.weights.bucket import Endpoint
from workers.weights.group import SENDER, WeightGroup, give_up
from workers.weights.memory import place, share, share_again

SLOTS = 2


class Transport(Protocol):
    """One rank's end. `slot` and `send` are called alternately, for bucket 0, 1, ... of every sync."""

    def endpoint(self) -> Endpoint:
        """Returns what the engines need to connect to this end."""

    def join(self, num_receivers: int) -> None:
        """Connects to the engines' processes, while they open their ends."""

    def slot(self, index: int) -> Tensor:
        """Returns memory for bucket `index`, [capacity] uint8; the engines are done with its old content."""

    def send(self, index: int, bucket: Tensor) -> None:
        """Hands over the slot's filled part [N]."""

    def close(self) -> None:
        """Drops the connection, from any thread: neither the engines nor this process wait for each other any more."""


class GroupTransport:
    """Broadcasts to all engines at once; the next bucket is gathered meanwhile."""

    def __init__(self, capacity: int, device: torch.device, address: str, timeout_s: float) -> None:
        self._device, self._address, self._timeout_s = device, address, timeout_s
        self._slots = [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._running: list[dist.Work | None] = [None] * SLOTS
        self._store = serve_store(address, timeout_s)
        self._group: WeightGroup | None = None

    def endpoint(self) -> Endpoint:
        return Endpoint(capacity=len(self._slots[0]), address=self._address, port=self._store.port)

    def join(self, num_receivers: int) -> None:
        self._group = WeightGroup(
            self._store, rank=SENDER, size=1 + num_receivers, device=self._device, timeout_s=self._timeout_s
        )

    def slot(self, index: int) -> Tensor:
        if (running := self._running[index % SLOTS]) is not None:
            assert self._group is not None
            self._group.wait(running)
            self._running[index % SLOTS] = None
        return self._slots[index % SLOTS]

    def send(self, index: int, bucket: Tensor) -> None:
        assert self._group is not None
        self._running[index % SLOTS] = self._group.broadcast(bucket)

    def close(self) -> None:
        give_up(self._store)  # also if the engines have not connected yet
        if self._group is not None:
            self._group.close()
        self._running = [None] * SLOTS  # gloo's connections live as long as its broadcasts


class MemoryTransport:
    """Has slots that the engine on the same GPU (without one: on the same machine) reads in place."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device, self._capacity = device, capacity
        self._slots, self._handles = zip(*[share(capacity, device) for _ in range(SLOTS)], strict=True)

    def endpoint(self) -> Endpoint:
        return Endpoint(capacity=self._capacity, place=place(self._device), handles=list(self._handles))

    def renew(self) -> None:
        """Makes new handles of the same slots, for engines that open them from now on."""
        self._handles = tuple(map(share_again, self._slots, self._handles))

    def join(self, num_receivers: int) -> None:
        """Does nothing: the engines open the handles by themselves."""

    def slot(self, index: int) -> Tensor:
        return self._slots[index % SLOTS]

    def send(self, index: int, bucket: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the engine's stream does not wait for this one

    def close(self) -> None:
        """Does nothing: there is no connection."""


def make_transport(
    name: str, capacity: int, *, rank: int, device: torch.device, address: str, timeout_s: float
) -> Transport | None:
    """Returns this rank's end; None if the transport does not use the rank. name: `broadcast` or `ipc`."""
    if name == "ipc":
        return MemoryTransport(capacity, device)  # each engine reads from the rank on its own GPU
    return GroupTransport(capacity, device, address, timeout_s) if rank == SENDER else None
