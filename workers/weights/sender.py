"""Sends weights from the actors: gathers bucket after bucket and hands each to a transport.

All actor ranks advance an iterator of full (name, tensor) pairs in lockstep. Between two buckets only the iterator and
the transport's slots hold memory. A transport has slots, memory in which buckets are built in turn. At most two buckets
exist at a time: one that the engines load, and the next. `slot` and `send` are called alternately, for bucket 0, 1, ...
of every sync; `close` may come from any thread.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dapo.workers.rendezvous import serve_store
from dapo.workers.weights.bucket import STORE, Bucket, BucketPlan, Endpoint, digest, plan_buckets
from dapo.workers.weights.group import SENDER, WeightGroup, give_up
from dapo.workers.weights.memory import Handle, place, share, share_again
from dapo.workers.weights.store import WeightStore

SLOTS = 2
WRITERS = 4  # threads that write to the store


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
        """Returns memory for bucket `index`, [capacity] uint8; the engines are done with its old content."""
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
    """Has slots that the engines on the same GPU (without one: on the same machine) read in place."""

    def __init__(self, capacity: int, device: torch.device, readers: int) -> None:
        """readers: number of engines that open handles of their own."""
        self._device, self._capacity = device, capacity
        self._slots, handles = zip(*[share(capacity, device) for _ in range(SLOTS)], strict=True)
        self._handles = [[*handles]]
        self._handles += [self._again() for _ in range(readers - 1)]

    def _again(self) -> list[Handle]:
        return [*map(share_again, self._slots, self._handles[0])]

    def endpoint(self) -> Endpoint:
        return Endpoint(capacity=self._capacity, place=place(self._device), handles=self._handles)

    def renew(self) -> None:
        """Makes new handles of the same slots, for engines that open them from now on."""
        self._handles = [self._again() for _ in self._handles]

    def join(self, num_receivers: int) -> None:
        """Does nothing: the engines open the handles by themselves."""

    def slot(self, index: int) -> Tensor:
        return self._slots[index % SLOTS]

    def send(self, index: int, bucket: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the engine's stream does not wait for this one

    def close(self) -> None:
        """Does nothing: there is no connection."""


class StoreTransport:
    """Writes to the weight store, in threads, from host memory that holds all buckets meanwhile: neither ranks nor
    engines wait for the store. It computes the digests too."""

    def __init__(self, store: WeightStore, capacity: int) -> None:
        self._store, self._capacity = store, capacity
        self._threads = ThreadPoolExecutor(WRITERS)
        self._writes: list[Future[tuple[str, str]]] = []

    def endpoint(self) -> Endpoint:
        return Endpoint(capacity=self._capacity)

    def join(self, num_receivers: int) -> None:
        """Does nothing: the engines come by themselves."""

    def slot(self, index: int) -> Tensor:
        if index == 0:
            self._writes = []
        return torch.empty(self._capacity, dtype=torch.uint8)

    def send(self, index: int, bucket: Tensor) -> None:
        self._writes.append(self._threads.submit(lambda: (digest(bucket), self._store.put(bucket))))

    def written(self, others: Collection[str]) -> list[tuple[str, str]]:
        """Waits for the last version. Returns digest and file name of each bucket; deletes what is neither of them nor
        among `others`."""
        found = [write.result() for write in self._writes]
        self._writes = []
        self._store.keep({name for _, name in found}.union(others))
        return found

    def close(self) -> None:
        """Does nothing: there is no connection."""


Transport = GroupTransport | MemoryTransport | StoreTransport


def make_transport(
    name: str,
    capacity: int,
    *,
    rank: int,
    device: torch.device,
    address: str,
    timeout_s: float,
    readers: int = 1,
    store: str = "",
) -> Transport | None:
    """Returns this rank's end; None if the transport does not use the rank. name: `broadcast`, `ipc` or `store`."""
    if name == "ipc":
        return MemoryTransport(capacity, device, readers)  # each engine reads from the rank on its own GPU
    if name == STORE:
        return StoreTransport(WeightStore(store), capacity) if rank == SENDER else None
    return GroupTransport(capacity, device, address, timeout_s) if rank == SENDER else None


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
        readers: int = 1,
        store: str = "",
    ) -> None:
        """parameters: starts a new pass, in the order of `shapes`. dtype: of the sent tensors, torch's name. readers:
        engines on one GPU. store: its URL."""
        self._parameters = parameters
        self._dtype_name, self._dtype = dtype, getattr(torch, dtype)
        self._rank, self._device, self._readers, self._store = rank, device, readers, store
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
        self._failure = ""
        self._iterator = iter(())  # an unfinished pass may hold a parameter
        if transport == "ipc" and isinstance(self._transport, MemoryTransport):
            self._transport.renew()
        elif transport != STORE or self._transport is None:
            self.close()
            self._transport = None  # free the old one first: two need twice the memory
            self._transport = make_transport(
                transport,
                capacity,
                rank=self._rank,
                device=self._device,
                address=address,
                timeout_s=timeout_s,
                readers=self._readers,
                store=self._store,
            )
        return None if self._transport is None else self._transport.endpoint()

    def join(self, num_receivers: int) -> None:
        """Connects to the engines' `num_receivers` processes, which open their ends at the same time. A failure is
        reported with the first bucket."""
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
            for one in plan.tensors:
                self._take(one.name, one.shape)
        else:
            bucket = slot[: plan.num_bytes]
            self._fill(bucket, plan)
            stores = isinstance(self._transport, StoreTransport)  # which computes it in its threads
            found = digest(bucket) if self._rank == SENDER and not stores else ""
            self._try(lambda transport: transport.send(index, bucket))
        if self._next == len(self._plans):
            self._iterator = iter(())  # otherwise it holds the last parameter until the next sync
        if self._rank != SENDER:
            return None
        return Bucket(index=index, plan=plan, dtype=self._dtype_name, digest=found, failure=self._failure)

    def stored(self, others: Collection[str]) -> list[tuple[str, str]]:
        assert isinstance(self._transport, StoreTransport)
        return self._transport.written(others)

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
        for one in plan.tensors:
            elements[one.start : one.stop].copy_(self._take(one.name, one.shape).reshape(-1))
        bucket[stop:].zero_()

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found, tensor = next(self._iterator, ("nothing", torch.empty(0)))
        if (found, tuple(tensor.shape)) != (name, shape):
            raise RuntimeError(
                f"the weight sync expected {name} {list(shape)}, and the actors gathered {found} {list(tensor.shape)}"
            )
        return tensor
