"""The process group of the weight sync: actor rank 0 and every worker process of every engine; broadcasts from rank 0.

It uses NCCL on GPU and gloo on CPU, and is separate from the process groups of FSDP and vLLM. Actors and engines both
use this module; they meet at a store that rank 0 serves.
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
POLL_S, ASK_S = 0.001, 0.2  # poll intervals of the GPU, and of the store
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()  # members may connect in threads


class WeightGroup:
    """Its constructor returns when all `size` processes have connected; `timeout_s` bounds that and every broadcast. A
    member that fails aborts the group for all: NCCL does not report a lost member, and the others would wait in their
    kernels. Using an aborted group raises RuntimeError; it must be replaced by a new one."""

    def __init__(self, store: dist.Store, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self._store, self._timeout = store, timedelta(seconds=timeout_s)
        self._nccl, self._closed = device.type == "cuda", False
        self._group: Any  # torch's type stubs give a bare backend no collectives
        if self._nccl:
            self._group = self._meet_by_nccl(rank, size, device)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, self._timeout)
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = SENDER, 0

    def _meet_by_nccl(
        self, rank: int, size: int, device: torch.device
    ) -> "dist.ProcessGroupNCCL":  # a torch without CUDA has none
        self._store.set(f"here/{rank}", "1")
        everyone = [f"here/{each}" for each in range(size)]
        self._until(lambda: self._store.check(everyone), f"for all {size} members")  # NCCL would wait forever
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        own = self._store.clone()  # type: ignore[attr-defined]  # a client that waits for a key blocks its other users
        with _errors_raise():
            group = dist.ProcessGroupNCCL(own, rank, size, options)
        group._set_sequence_number_for_group()
        self._connect(group, device)  # otherwise the first bucket pays for it
        return group

    def _connect(self, group: "dist.ProcessGroupNCCL", device: torch.device) -> None:
        """Connects the members in a thread. NCCL has no deadline there, and can be aborted only once it has connected:
        if the group is aborted, the thread stays in the call and aborts a connection that comes too late."""
        connected: Future[None] = Future()

        def connect() -> None:
            failure = None
            try:
                group.eager_connect_single_device(device)
            except RuntimeError as error:
                failure = error
            if not connected.set_running_or_notify_cancel():
                group.abort()  # not left to the destructor, which ends the process if it fails
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
        """Waits until a broadcast has ended. Raises RuntimeError if the other end is lost or does not answer for
        `timeout_s`, or a member aborted the group."""
        try:
            if self._nccl:
                self._until(work.is_completed, "for the others in a broadcast")
            work.wait(self._timeout)
            if self._closed:  # an aborted broadcast also counts as completed
                raise RuntimeError("the weight sync was given up meanwhile")
        except RuntimeError:
            self.close()
            self._group = None  # closes gloo's connections: members that wait for this process raise too
            raise

    def _until(self, done: Callable[[], bool], what: str) -> None:
        """Polls until `done`. Raises RuntimeError on a timeout, or if the group was aborted."""
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
        """Aborts the group, from any thread. With NCCL all waiting processes return; with gloo each raises itself."""
        group, before, self._closed = self._group, self._closed, True
        give_up(self._store)
        if self._nccl and not before:
            group.abort()  # its kernels end


def give_up(store: dist.Store) -> None:
    """Aborts the group that meets at `store`, for all members that are there or come later."""
    with suppress(RuntimeError):  # the process that serves the store may be the lost one
        store.set(GIVEN_UP, "1")


@contextmanager
def _errors_raise() -> Iterator[None]:
    """Makes NCCL groups created in the block report errors to the waiting caller. Otherwise a torch thread watches for
    errors and ends the process, and with it FSDP's group or the engine."""
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
