"""Deals out items to the Ray workers of reward functions or of the reward model by cost, and returns results or
`WorkerLost`. Items are batched into few calls; results are streamed back."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError

from dapo.ground.watchdog import waiting
from dapo.workers.scoring.verdict import CanaryError
from dapo.workers.supervise import Worker, Workers

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


class Fleet:
    """All workers of one kind."""

    def __init__(
        self,
        make: Callable[[int], Any],
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
        """make, start, name, count, warn: see `Workers`. A worker's streaming method `score(items)` yields lists of
        (number of the item, result).

        window: largest cost of the items at one worker. timeout_s: longest time without a result from a worker that has
        items; timeout_key: its configuration key. one_call: a worker processes all items of a call together, and gets
        items only when it has none; otherwise calls overlap, so that it never waits.
        """
        self.workers = Workers(make, start, name=name, count=count, warn=warn, on_change=self._changed)
        self._name, self._window, self._one_call = name, window, one_call
        self._timeout_s, self._timeout_key = timeout_s, timeout_key
        self._called = [-math.inf] * count  # when each worker last got items
        self._progress = [0.0] * count  # time of its last result, or of receiving items while it had none
        self._waiting: deque[_Job] = deque()
        self._planned = False

    async def score(self, item: Any, *, cost: int = 1, avoid: int = -1) -> tuple[Any, int]:
        """Returns the result and the number of the worker that gave it. cost: an item whose cost is the whole window or
        more is alone at its worker. avoid: a worker that must not get the item, unless it is the only one. Raises
        WorkerLost if the worker that had the item is lost, RemoteError if the fleet is broken and no result can be
        trusted."""
        if self.workers.broken is not None:
            raise self.workers.broken
        job = _Job(item=item, cost=cost, avoid=avoid, done=asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._plan()
        with waiting(f"{self._name}s", each="responses"):
            return await job.done

    async def check(self) -> list[Any]:
        """Calls `check` of each worker and returns the results; replaces workers that do not answer. Raises RemoteError
        if one failed its known answers."""
        if self.workers.broken is None:
            with waiting(f"{self._name}s to score the known answers"):
                results = await asyncio.gather(*[self._check(worker) for worker in self.workers.all if worker.up])
        if self.workers.broken is not None:
            raise self.workers.broken
        return [result for result in results if result is not None]

    async def _check(self, worker: Worker) -> Any:
        handle = worker.handle
        try:
            return await asyncio.wait_for(handle.check.remote(), self._timeout_s)
        except (RayError, TimeoutError) as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, CanaryError):
                raise self.workers.fail(f"{self._name} {worker.index}: {error.cause}") from error.cause
            why = f"no answer to its check ({str(error).splitlines()[:1]})"
            if (replacement := self.workers.lose(worker, handle, why)) is not None:
                await replacement  # the new one is checked as it starts

    def _changed(self) -> None:
        if (broken := self.workers.broken) is None:
            self._plan()
            return
        for job in self._waiting:
            if not job.done.done():
                job.done.set_exception(broken)
        self._waiting.clear()

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
        takers = [worker for worker in self.workers.all if worker.up and self._takes(worker, now, waiting)]
        while self._waiting and takers:
            job = self._waiting.popleft()
            if job.done.done():  # cancelled by its caller
                continue
            allowed = [worker for worker in takers if worker.index != job.avoid or len(self.workers.all) == 1]
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
            self._called[index] = now
            self.workers.spawn(self._send(self.workers.all[index], jobs))
        if self._waiting:
            self._plan(GAP_S)

    def _takes(self, worker: Worker, now: float, waiting: int) -> bool:
        """Whether a worker may get another call: one per `GAP_S`, because a call costs as much as scoring a dozen
        responses, and half a window at a time if that much waits."""
        if self._one_call:
            return worker.load == 0
        room = self._window - worker.load
        return now - self._called[worker.index] >= GAP_S and room >= min(waiting, self._window // 2)

    async def _send(self, worker: Worker, jobs: Sequence[_Job]) -> None:
        """Makes one remote call; items left without a result are lost with their worker."""
        handle, left = worker.handle, dict(enumerate(jobs))
        reason = "its worker gave no verdict"
        if worker.load == sum(job.cost for job in jobs):
            self._progress[worker.index] = asyncio.get_running_loop().time()
        try:
            stream = handle.score.options(num_returns="streaming").remote([job.item for job in jobs])
            async for part in self._parts(worker, stream):
                self.workers.answered()
                for number, result in part:
                    job = left.pop(number)
                    worker.load -= job.cost
                    if not job.done.done():
                        job.done.set_result((result, worker.index))
                self._plan()
        except (RayError, TimeoutError) as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, CanaryError):
                self.workers.fail(f"{self._name} {worker.index}: {error.cause}")
            else:
                text = f"{type(error.cause).__name__}: {error.cause}" if isinstance(error, RayTaskError) else str(error)
                reason = f"its worker was lost ({text.splitlines()[0]})"
                self.workers.lose(worker, handle, reason)
        finally:
            worker.load -= sum(job.cost for job in left.values())
            for job in left.values():
                if not job.done.done():
                    job.done.set_exception(self.workers.broken or WorkerLost(reason, worker.index))

    async def _parts(self, worker: Worker, stream: AsyncIterator[Any]) -> AsyncIterator[list[tuple[int, Any]]]:
        """Yields the results of a call. A call may wait long behind others, so the timeout applies to the progress of
        all calls of the worker."""
        clock = asyncio.get_running_loop().time
        while True:
            step = asyncio.ensure_future(_next(stream))
            try:
                while not step.done():
                    quiet = clock() - self._progress[worker.index]
                    if quiet >= self._timeout_s:
                        raise TimeoutError(f"no verdict for {self._timeout_s:g} s, `{self._timeout_key}`")
                    await asyncio.wait({step}, timeout=self._timeout_s - quiet)
            finally:
                if not step.done():
                    step.cancel()
            part = step.result()
            if part is None:
                return
            self._progress[worker.index] = clock()
            yield part


async def _next(stream: AsyncIterator[Any]) -> Any:
    """Returns the next value of the stream, None at its end."""
    try:
        return await (await anext(stream))
    except StopAsyncIteration:
        return None
