"""Forms the process group of the weight sync: actor rank 0 and every worker process of every engine.

In: a store that rank 0 serves, and a place in the group. Out: broadcasts from rank 0, NCCL on GPU, gloo on CPU. It
stands next to the process groups that FSDP and vLLM make for themselves; the engines' half uses it as well.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SENDER = 0
GIVEN_UP = "given up"  # a key of the store
POLL_S, ASK_S = 0.001, 0.2  # between two looks at the GPU, and at the store
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()  # members may meet in threads


class WeightGroup:
    """Returns from its constructor when all `size` processes are there; `timeout_s` bounds that and every broadcast.

    Whoever fails gives the group up for all: NCCL tells nobody that a member is gone, and the others would wait in
    their kernels. A group that was given up raises RuntimeError whatever it is asked for; another one takes its place.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self._store, self._timeout = store, timedelta(seconds=timeout_s)
        self._nccl, self._closed = device.type == "cuda", False
        meet = self._meet_by_nccl if self._nccl else self._meet_by_gloo
        self._group: Any = meet(rank, size, device)  # torch's type stubs give a bare backend no collectives
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = SENDER, 0

    def _meet_by_gloo(self, rank: int, size: int, device: torch.device) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(self._store, rank, size, self._timeout)

    def _meet_by_nccl(
        self, rank: int, size: int, device: torch.device
    ) -> "dist.ProcessGroupNCCL":  # a torch without CUDA has none
        self._store.set(f"here/{rank}", "1")
        everyone = [f"here/{each}" for each in range(size)]
        self._until(lambda: self._store.check(everyone), f"for all {size} members")  # NCCL would wait for ever
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        own = self._store.clone()  # type: ignore[attr-defined]  # one that waits for a key lets nobody else ask
        with _errors_raise():
            group = dist.ProcessGroupNCCL(own, rank, size, options)
        group._set_sequence_number_for_group()
        self._connect(group, device)  # else the first bucket pays for it
        return group

    def _connect(self, group: "dist.ProcessGroupNCCL", device: torch.device) -> None:
        """Connects the members in a thread. NCCL has no deadline there, and can be aborted only once it has connected:
        the thread stays in it where the group is given up, and aborts what comes of it too late."""
        connected: Future[None] = Future()

        def connect() -> None:
            failure = None
            try:
                group.eager_connect_single_device(device)
            except RuntimeError as error:
                failure = error
            if not connected.set_running_or_notify_cancel():
                group.abort()  # its destructor would end the process where it cannot
            elif failure is None:
                connected.set_result(None)
            else:
                connected.set_exception(failure)

        threading.Thread(target=connect, daemon=True).start()
        try:
            self._until(connected.done, "for NCCL to connect them")
        except RuntimeError:
            if not connected.cancel():
                group.abort()
            raise
        connected.result()

    def broadcast(self, data: Tensor) -> dist.Work:
        """Sends rank 0's `data` [N] uint8 into everyone's, in the background; `wait` before touching it."""
        if self._closed:
            raise RuntimeError("the weight sync was given up")
        work: dist.Work = self._group.broadcast([data], self._options)
        return work

    def wait(self, work: dist.Work) -> None:
        """Waits for a broadcast, until it has come to its end.

        Raises:
            RuntimeError: the other end is gone or kept silent for `timeout_s`, or somebody gave the group up.
        """
        try:
            if self._nccl:
                self._until(work.is_completed, "for the others in a broadcast")
            work.wait(self._timeout)
            if self._closed:  # an aborted broadcast has ended as well
                raise RuntimeError("the weight sync was given up meanwhile")
        except RuntimeError:
            self.close()
            self._group = None  # ends gloo's connections: who waits for this process raises too
            raise

    def _until(self, done: Callable[[], bool], what: str) -> None:
        """Waits on the host. Raises RuntimeError where it is not done in time, or will not be."""
        deadline, asked = time.monotonic() + self._timeout.total_seconds(), 0.0
        while not done():
            if (now := time.monotonic()) > deadline:
                raise RuntimeError(f"waited {self._timeout.total_seconds():g} s {what}")
            if now > asked + ASK_S:
                asked = now
                if self._store.check([GIVEN_UP]):
                    raise RuntimeError(f"the weight sync was given up while this process waited {what}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Gives the group up, from any thread. With NCCL no process waits in it any more; with gloo each raises by
        itself."""
        group, before, self._closed = self._group, self._closed, True
        give_up(self._store)
        if self._nccl and not before:
            group.abort()  # its kernels end


def give_up(store: dist.Store) -> None:
    """Tells all members of the group that meets at `store`, now or later, that it is given up."""
    with suppress(RuntimeError):  # the process that serves the store may be the one that is gone
        store.set(GIVEN_UP, "1")


@contextmanager
def _errors_raise() -> Iterator[None]:
    """Has NCCL groups that are made in the block leave errors to whoever waits.

    Else torch has a thread look for them, which ends the process, and with it FSDP's group or the engine.
    """
    with _environment:
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before
