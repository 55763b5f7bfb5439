"""Supervision of processes. `Workers` replaces actors whose loss shows in a call: reward workers, reward models and
workers of rollout functions. `keep_up` restarts a process that is watched: engines and judges."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from dapo.ground.restarts import Restarts
from dapo.workers.remote import RemoteError
from dapo.workers.scoring.verdict import CanaryError

START_ATTEMPTS = 3  # of a replacement: the cause of the loss may persist
PAUSE_S = 1.0  # after a failed attempt; `Workers` doubles it
MAX_LOST_IN_A_ROW = 5  # losses per worker, without an answer in between, that break all

Warn = Callable[[str], None]


@dataclass(kw_only=True, slots=True, eq=False)
class Worker:
    """The slot of a worker. up: it has started and is not lost. load: of its items or calls. about: what it returned at
    its start. restarts: number of replacements."""

    index: int
    handle: Any
    up: bool = False
    load: int = 0
    about: Any = None
    restarts: int = 0


class Workers:
    """All workers of one kind. broken: why no call can be answered any more, or None. changed: set, then replaced, when
    a worker is up or all are broken."""

    def __init__(
        self,
        make: Callable[[int], Any],
        start: Callable[[Any, int, float], Awaitable[Any]],
        *,
        name: str,
        count: int,
        warn: Warn = lambda message: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Creates the workers without starting them.

        make(index): a new actor. start(handle, index, timeout_s): waits until it can work, and returns its description;
        raises RemoteError, with a CanaryError as cause if replacing the worker would not help. name: of a worker, in
        messages. on_change: called with every change.
        """
        self.broken: RemoteError | None = None
        self.changed = asyncio.Event()
        self.all = [Worker(index=index, handle=make(index)) for index in range(count)]
        self._make, self._start, self._name, self._warn = make, start, name, warn
        self._on_change = on_change
        self._timeout_s = 0.0
        self._lost_in_a_row = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def restarts(self) -> int:
        return sum(worker.restarts for worker in self.all)

    async def start(self, timeout_s: float) -> Any:
        """Waits until all can work; returns the description of the first one. Raises RemoteError if one cannot.
        timeout_s: also for every replacement later."""
        self._timeout_s = timeout_s
        await asyncio.gather(*[self._begin(worker) for worker in self.all])
        return self.all[0].about

    def answered(self) -> None:
        self._lost_in_a_row = 0

    def lose(self, worker: Worker, handle: Any, reason: str) -> "asyncio.Task[None] | None":
        """Replaces a worker, unless this handle is already known to be lost; breaks all if workers are lost again and
        again. Returns the replacement."""
        if worker.handle is not handle or not worker.up:
            return None
        worker.up = False  # immediately, because its other calls fail in the same event loop turn
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= MAX_LOST_IN_A_ROW * len(self.all):
            self.fail(f"{self._name}s were lost {self._lost_in_a_row} times in a row; the last time {reason}")
            return None
        self._warn(f"{self._name} {worker.index} is replaced: {reason}")
        return self.spawn(self._replace(worker))

    async def restart(self, worker: Worker) -> None:
        """Replaces a worker by a new one. Raises RemoteError if that does not start."""
        worker.up = False
        _kill(worker.handle)
        worker.handle = self._make(worker.index)
        worker.restarts += 1
        await self._begin(worker)

    def fail(self, reason: str) -> RemoteError:
        """Makes all calls raise from now on, pending ones included."""
        self.broken = self.broken or RemoteError(reason)
        self.notify()
        return self.broken

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
        self._on_change()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Runs a task that `stop` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self) -> None:
        self.fail(f"the {self._name}s are stopped")
        for task in self._tasks:
            task.cancel()
        for worker in self.all:
            _kill(worker.handle)

    async def _begin(self, worker: Worker) -> None:
        worker.about = await self._start(worker.handle, worker.index, self._timeout_s)
        worker.up = True
        self.notify()

    async def _replace(self, worker: Worker) -> None:
        clock = asyncio.get_running_loop().time
        end, pause = clock() + self._timeout_s, PAUSE_S
        for left in reversed(range(START_ATTEMPTS)):
            try:
                return await self.restart(worker)
            except RemoteError as error:
                if not left or clock() >= end or isinstance(error.__cause__, CanaryError):
                    self.fail(str(error))
                    return
                self._warn(f"{self._name} {worker.index} did not start: {error}")
            await asyncio.sleep(pause)
            pause *= 2


async def keep_up(
    name: str,
    limit: Restarts,
    until_lost: Callable[[], Awaitable[str]],
    restart: Callable[[], Awaitable[None]],
    warn: Warn,
    rejoin: Callable[[], Awaitable[None]] | None = None,
) -> str:
    """Restarts a process whenever it is lost; returns the last reason once the limit is reached.

    until_lost: returns why it is lost, as soon as it is. restart: raises RemoteError if it does not start. rejoin:
    called after every successful restart.
    """
    while True:
        reason = await until_lost()
        warn(f"{name} is lost: {reason}")
        while not limit.spent():
            limit.add()
            try:
                await restart()
                break
            except RemoteError as error:
                reason = str(error)
                warn(f"{name} did not start again: {reason}")
                await asyncio.sleep(PAUSE_S)
        else:
            return reason
        limit.worked()
        if rejoin is not None:
            await rejoin()


def _kill(handle: Any) -> None:
    with suppress(Exception):
        ray.kill(handle)
