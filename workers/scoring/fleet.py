"""Supervises the Ray workers of reward functions or of the reward model: deals out items by cost, returns results or
`WorkerLost`, and replaces workers that die or hang. Items are batched into few calls; results are streamed back."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dapo.report.watchdog import waiting
from workers.remote import RemoteError
from workers.scoring.verdict import CanaryError

START_ATTEMPTS = 3  # of a replacement: the cause of the loss may persist
PAUSE_S = 1.0  # after a failed attempt; doubles
MAX_LOST_IN_A_ROW = 5  # losses per worker of the fleet, without a result in between, that break the fleet
GAP_S = 0.01  # between two calls to a worker, to batch items


class WorkerLost(RuntimeError):
    """A worker was lost with an item; the message says how. worker: its number."""

    def __init__(self, reason: str, worker: int) -> None:
        super().__init__(reason)
        self.worker = worker


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    item: Any
    cost: int
    avoid: int
    done: "asyncio.Future[tuple[Any, int]]"


@dataclass(kw_only=True, slots=True, eq=False)
class _Worker:
    """State of a worker. load: cost of its items. progress: time of its last result, or of receiving items while it had
    none. called: time it last got items. about: what it returned at its start."""

    index: int
    handle: Any
    up: bool = False
    load: int = 0
    progress: float = 0.0
    called: float = -math.inf
    about: Any = None


class Fleet:
    """All workers of one kind. respawned: number of replacements."""

    def __init__(
        self,
        create: Callable[[int], Any],
        start: Callable[[Any, int, float], Awaitable[Any]],
        *,
        name: str,
        count: int,
        window: int,
        timeout_s: float,
        timeout_key: str,
        one_call: bool = False,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Creates the workers without starting them.

        create(index): a new actor; its streaming method `score(items)` yields lists of (number of the item, result).
        start(handle, index, timeout_s): waits until it can score and returns its description; raises RemoteError, with
        a CanaryError as cause if replacing the worker would not help. name: of a worker, in messages. window: largest
        cost of the items at one worker. timeout_s: longest time without a result from a worker that has items;
        timeout_key: its configuration key. one_call: a worker processes all items of a call together, and gets items
        only when it has none; otherwise calls overlap, so that it never waits.
        """
        self.respawned = 0
        self._create, self._start_worker = create, start
        self._name, self._window, self._one_call = name, window, one_call
        self._timeout_s, self._timeout_key = timeout_s, timeout_key
        self._warn = warn
        self._start_timeout_s = 0.0
        self._workers = [_Worker(index=index, handle=create(index)) for index in range(count)]
        self._waiting: deque[_Job] = deque()
        self._planned, self._lost_in_a_row = False, 0
        self._broken: RemoteError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, start_timeout_s: float) -> Any:
        """Waits until all workers can score; returns the description of the first one. Raises RemoteError if one
        cannot. start_timeout_s: also for every replacement later."""
        self._start_timeout_s = start_timeout_s
        await asyncio.gather(*[self._start(worker) for worker in self._workers])
        return self._workers[0].about

    async def score(self, item: Any, *, cost: int = 1, avoid: int = -1) -> tuple[Any, int]:
        """Returns the result and the number of the worker that gave it. cost: an item whose cost is the whole window or
        more is alone at its worker. avoid: a worker that must not get the item, unless it is the only one. Raises
        WorkerLost if the worker that had the item is lost, RemoteError if the fleet is broken and no result can be
        trusted."""
        if self._broken is not None:
            raise self._broken
        job = _Job(item=item, cost=cost, avoid=avoid, done=asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._plan()
        with waiting(f"{self._name}s", each="responses"):
            return await job.done

    async def check(self) -> list[Any]:
        """Calls `check` of each worker and returns the results; replaces workers that do not answer. Raises RemoteError
        if one failed its known answers."""
        if self._broken is not None:
            raise self._broken
        with waiting(f"{self._name}s to score the known answers"):
            results = await asyncio.gather(*[self._check(worker) for worker in self._workers if worker.up])
        if self._broken is not None:
            raise self._broken
        return [result for result in results if result is not None]

    def stop(self) -> None:
        """Kills all workers; pending calls of `score` raise RemoteError."""
        self._break(f"the {self._name}s are stopped")
        for task in self._tasks:
            task.cancel()
        for worker in self._workers:
            ray.kill(worker.handle)

    async def _start(self, worker: _Worker) -> None:
        worker.about = await self._start_worker(worker.handle, worker.index, self._start_timeout_s)
        worker.up = True
        self._plan()

    async def _check(self, worker: _Worker) -> Any:
        handle = worker.handle
        try:
            return await asyncio.wait_for(handle.check.remote(), self._timeout_s)
        except (RayError, TimeoutError) as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, CanaryError):
                raise self._break(f"{self._name} {worker.index}: {error.cause}") from error.cause
            self._warn(
                f"{self._name} {worker.index} is replaced: no answer to its check ({str(error).splitlines()[:1]})"
            )
            await self._replace(worker, handle)  # the new one is checked as it starts

    def _plan(self, delay_s: float = 0.0) -> None:
        """Schedules `_deal` for the end of this event loop turn or later, so that simultaneous items share one call."""
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_later(delay_s, self._deal)

    def _deal(self) -> None:
        """Sends waiting items to the least loaded workers. An item that does not fit yet keeps its place, and the
        workers it may go to get nothing else before it."""
        self._planned = False
        dealt: dict[int, list[_Job]] = {}
        kept: deque[_Job] = deque()
        now = asyncio.get_running_loop().time()
        waiting = sum(job.cost for job in self._waiting)
        takers = [worker for worker in self._workers if worker.up and self._takes(worker, now, waiting)]
        while self._waiting and takers:
            job = self._waiting.popleft()
            if job.done.done():  # cancelled by its caller
                continue
            allowed = [worker for worker in takers if worker.index != job.avoid or len(self._workers) == 1]
            fitting = [one for one in allowed if not one.load or one.load + job.cost <= self._window]
            if not fitting:
                kept.append(job)
                takers = [worker for worker in takers if worker not in allowed]
                continue
            worker = min(fitting, key=lambda one: one.load)
            worker.load += job.cost
            dealt.setdefault(worker.index, []).append(job)
        self._waiting.extendleft(reversed(kept))
        for index, jobs in dealt.items():
            self._workers[index].called = now
            self._spawn(self._send(self._workers[index], jobs))
        if self._waiting:
            self._plan(GAP_S)

    def _takes(self, worker: _Worker, now: float, waiting: int) -> bool:
        """Whether a worker may get another call: one per `GAP_S`, because a call costs as much as scoring a dozen
        responses, and half a window at a time if that much waits."""
        if self._one_call:
            return worker.load == 0
        room = self._window - worker.load
        return now - worker.called >= GAP_S and room >= min(waiting, self._window // 2)

    async def _send(self, worker: _Worker, jobs: Sequence[_Job]) -> None:
        """Makes one remote call; items left without a result are lost with their worker."""
        handle, left = worker.handle, dict(enumerate(jobs))
        reason = "its worker gave no verdict"
        if worker.load == sum(job.cost for job in jobs):
            worker.progress = asyncio.get_running_loop().time()
        try:
            stream = handle.score.options(num_returns="streaming").remote([job.item for job in jobs])
            async for part in self._parts(worker, stream):
                self._lost_in_a_row = 0
                for number, result in part:
                    job = left.pop(number)
                    worker.load -= job.cost
                    if not job.done.done():
                        job.done.set_result((result, worker.index))
                self._plan()
        except (RayError, TimeoutError) as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, CanaryError):
                self._break(f"{self._name} {worker.index}: {error.cause}")
            else:
                text = f"{type(error.cause).__name__}: {error.cause}" if isinstance(error, RayTaskError) else str(error)
                reason = f"its worker was lost ({text.splitlines()[0]})"
                self._lose(worker, handle, reason)
        finally:
            worker.load -= sum(job.cost for job in left.values())
            for job in left.values():
                if not job.done.done():
                    job.done.set_exception(self._broken or WorkerLost(reason, worker.index))

    async def _parts(self, worker: _Worker, stream: AsyncIterator[Any]) -> AsyncIterator[list[tuple[int, Any]]]:
        """Yields the results of a call. A call may wait long behind others, so the timeout applies to the progress of
        all calls of the worker."""
        clock = asyncio.get_running_loop().time
        while True:
            step = asyncio.ensure_future(_next(stream))
            try:
                while not step.done():
                    quiet = clock() - worker.progress
                    if quiet >= self._timeout_s:
                        raise TimeoutError(f"no verdict for {self._timeout_s:g} s, `{self._timeout_key}`")
                    await asyncio.wait({step}, timeout=self._timeout_s - quiet)
            finally:
                if not step.done():
                    step.cancel()
            part = step.result()
            if part is None:
                return
            worker.progress = clock()
            yield part

    def _lose(self, worker: _Worker, handle: Any, reason: str) -> None:
        if worker.handle is not handle or not worker.up:
            return
        worker.up = False  # immediately, because its other calls fail in the same event loop turn
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= MAX_LOST_IN_A_ROW * len(self._workers):
            self._break(f"{self._name}s were lost {self._lost_in_a_row} times in a row; the last time {reason}")
            return
        self._warn(f"{self._name} {worker.index} is replaced: {reason}")
        self._spawn(self._replace(worker, handle))

    async def _replace(self, worker: _Worker, handle: Any) -> None:
        if worker.handle is not handle:
            return
        worker.up = False
        began = asyncio.get_running_loop().time()
        for left in reversed(range(START_ATTEMPTS)):
            ray.kill(worker.handle)
            worker.handle = self._create(worker.index)
            self.respawned += 1
            try:
                return await self._start(worker)
            except RemoteError as error:
                late = asyncio.get_running_loop().time() - began >= self._start_timeout_s
                if left == 0 or late or isinstance(error.__cause__, CanaryError):
                    self._break(str(error))
                    return
                await asyncio.sleep(PAUSE_S * 2 ** (START_ATTEMPTS - 1 - left))

    def _break(self, reason: str) -> RemoteError:
        """Makes all calls of `score` raise from now on, pending ones included."""
        self._broken = self._broken or RemoteError(reason)
        for job in self._waiting:
            if not job.done.done():
                job.done.set_exception(self._broken)
        self._waiting.clear()
        return self._broken

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _next(stream: AsyncIterator[Any]) -> Any:
    """Returns the next value of the stream, None at its end."""
    try:
        return await (await anext(stream))
    except StopAsyncIteration:
        return None
