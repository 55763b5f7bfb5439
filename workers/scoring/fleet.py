"""The Ray side of scoring: items out to the workers in few calls, verdicts back as they are made, workers replaced.

In: items. Out: a verdict each, or the failure of the worker that had it. The fleet knows no prompt and no reward.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dapo.rewards.fork_server import Item
from workers.remote import RemoteError, wait
from workers.scoring.children import CHANGED, CanaryError
from workers.scoring.verdict import Verdict, of_end

WINDOW = 64  # items of one child that may be with its worker: half of them keep it busy while a call brings more


START_ATTEMPTS = 3  # of a worker in another's place: what killed that one may not be over
GAP_S = 0.01  # between two calls to a worker: what ends meanwhile goes together


class _Silent(RuntimeError):
    """A worker with items has said nothing for too long."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    item: Item
    done: "asyncio.Future[tuple[Verdict, int]]"
    avoid: int


@dataclass(kw_only=True, slots=True, eq=False)
class _Worker:
    """progress: when it last gave a verdict, or got items while it had none. called: when it last got items."""

    index: int
    handle: Any
    up: bool = False
    load: int = 0
    progress: float = 0.0
    called: float = -math.inf
    about: dict[str, Any] = field(default_factory=dict)


class Fleet:
    """All reward workers. respawned: workers that were replaced. calls: remote calls made for items."""

    def __init__(
        self, create: Callable[[], Any], arguments: tuple[Any, ...], *, count: int, children: int, timeout_s: float
    ) -> None:
        """create: a new worker, not started. arguments: of its `start`. children: processes of each worker."""
        self.respawned = self.calls = 0
        self._create = create
        self._arguments = arguments
        self._window = WINDOW * children
        self._timeout_s = timeout_s
        self._start_timeout_s = 0.0
        self._workers = [_Worker(index=index, handle=create()) for index in range(count)]
        self._waiting: deque[_Job] = deque()
        self._planned = False
        self._broken: RemoteError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, start_timeout_s: float) -> dict[str, Any]:
        """Waits until all workers have scored the known answers; what they tell of the functions.

        Raises:
            RemoteError: a function cannot be loaded or fails a known answer, and why.
        """
        self._start_timeout_s = start_timeout_s
        await asyncio.gather(*[self._start(worker) for worker in self._workers])
        if len({worker.about["digest"] for worker in self._workers}) > 1:
            raise RemoteError("the files of `reward.functions` differ from node to node; give all nodes the same")
        return self._workers[0].about

    async def verdict(self, item: Item, *, avoid: int = -1) -> tuple[Verdict, int]:
        """The verdict and the number of the worker that gave it. avoid: a worker that shall not have it again, unless
        there is no other.

        Raises:
            RemoteError: the pool is broken; no verdict can be trusted.
        """
        if self._broken is not None:
            raise self._broken
        job = _Job(item=item, done=asyncio.get_running_loop().create_future(), avoid=avoid)
        self._waiting.append(job)
        self._plan()
        return await job.done

    async def check(self) -> None:
        """Every child that scored since its last check scores the known answers again.

        Raises:
            RemoteError: one of them failed.
        """
        if self._broken is not None:
            raise self._broken
        await asyncio.gather(*[self._check(worker) for worker in self._workers if worker.up])
        if self._broken is not None:
            raise self._broken

    def stop(self) -> None:
        """Ends all workers; their children end with them."""
        self._broken = self._broken or RemoteError("the reward workers are stopped")
        for task in self._tasks:
            task.cancel()
        for worker in self._workers:
            ray.kill(worker.handle)

    async def _start(self, worker: _Worker) -> None:
        what = f"reward worker {worker.index} to start"
        [worker.about] = await wait(
            [worker.handle.start.remote(*self._arguments)], self._start_timeout_s, what, "rollout.start_timeout_s"
        )
        others = [other.about["digest"] for other in self._workers if other.up]
        if others and self.respawned and worker.about["digest"] not in others:
            raise RemoteError(CHANGED) from CanaryError()
        worker.up = True
        self._plan()

    async def _check(self, worker: _Worker) -> None:
        handle = worker.handle
        try:
            await asyncio.wait_for(handle.check.remote(), self._timeout_s)
        except RayTaskError as error:
            raise self._break(f"reward worker {worker.index}: {error.cause}") from error.cause
        except (RayError, TimeoutError):
            await self._replace(worker, handle)  # the new one is checked as it starts

    def _plan(self, delay_s: float = 0.0) -> None:
        """Deals at the end of this turn of the event loop or later, so that what comes together goes together."""
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_later(delay_s, self._deal)

    def _deal(self) -> None:
        self._planned = False
        dealt: dict[int, list[_Job]] = {}
        kept: deque[_Job] = deque()
        now = asyncio.get_running_loop().time()
        takers = [worker for worker in self._workers if worker.up and self._takes(worker, now)]
        while self._waiting:
            rooms = [worker for worker in takers if worker.load < self._window]
            if not rooms:
                break
            job = self._waiting.popleft()
            if job.done.done():  # nobody waits for it any more
                continue
            others = [worker for worker in rooms if worker.index != job.avoid or len(self._workers) == 1]
            if not others:
                kept.append(job)
                continue
            worker = min(others, key=lambda one: one.load)
            worker.load += 1
            dealt.setdefault(worker.index, []).append(job)
        self._waiting.extendleft(reversed(kept))
        for index, jobs in dealt.items():
            self._workers[index].called = now
            self._spawn(self._call(self._workers[index], jobs))
        if self._waiting:
            self._plan(GAP_S)

    def _takes(self, worker: _Worker, now: float) -> bool:
        """A call costs as much as scoring a dozen responses: a worker gets one in `GAP_S`, and half a window at a time
        where that much waits."""
        room = self._window - worker.load
        return now - worker.called >= GAP_S and room >= min(len(self._waiting), self._window // 2)

    async def _call(self, worker: _Worker, jobs: list[_Job]) -> None:
        """One remote call; what it leaves without a verdict fell with its worker."""
        handle, left = worker.handle, dict(enumerate(jobs))
        reason = "its worker gave no verdict"
        if worker.load == len(jobs):
            worker.progress = asyncio.get_running_loop().time()
        self.calls += 1
        try:
            stream = handle.score.options(num_returns="streaming").remote([job.item for job in jobs])
            async for part in self._parts(worker, stream):
                for number, verdict in part:
                    _finish(left.pop(number), verdict, worker.index)
                    worker.load -= 1
                self._plan()
        except RayTaskError as error:
            self._break(f"reward worker {worker.index}: {error.cause}")
        except (RayError, _Silent) as error:
            reason = f"its worker was lost ({str(error).splitlines()[0]})"
            self._spawn(self._replace(worker, handle))
        finally:
            worker.load -= len(left)
            lost = of_end("crash", reason, 0.0)
            for job in left.values():
                if self._broken is None:
                    _finish(job, lost, worker.index)
                elif not job.done.done():
                    job.done.set_exception(self._broken)

    async def _parts(self, worker: _Worker, stream: AsyncIterator[Any]) -> AsyncIterator[list[tuple[int, Verdict]]]:
        """The call's verdicts. A call may wait long behind others; silence is when none of a worker's calls goes on."""
        clock = asyncio.get_running_loop().time
        while True:
            step = asyncio.ensure_future(_next(stream))
            try:
                while not step.done():
                    quiet = clock() - worker.progress
                    if quiet >= self._timeout_s:
                        raise _Silent(f"no verdict for {self._timeout_s:g} s, `reward.timeout_s`")
                    await asyncio.wait({step}, timeout=self._timeout_s - quiet)
            finally:
                if not step.done():
                    step.cancel()
            part = step.result()
            if part is None:
                return
            worker.progress = clock()
            yield part

    async def _replace(self, worker: _Worker, handle: Any) -> None:
        """Once for all calls that a lost worker had."""
        if worker.handle is not handle:
            return
        worker.up = False
        began = asyncio.get_running_loop().time()
        for left in reversed(range(START_ATTEMPTS)):
            ray.kill(worker.handle)
            worker.handle = self._create()
            self.respawned += 1
            try:
                return await self._start(worker)
            except RemoteError as error:
                late = asyncio.get_running_loop().time() - began >= self._start_timeout_s
                if left == 0 or late or isinstance(error.__cause__, CanaryError):
                    self._break(str(error))
                    return

    def _break(self, reason: str) -> RemoteError:
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


def _finish(job: _Job, verdict: Verdict, index: int) -> None:
    if not job.done.done():
        job.done.set_result((verdict, index))


async def _next(stream: AsyncIterator[Any]) -> Any:
    """None at the end."""
    try:
        return await (await anext(stream))
    except StopAsyncIteration:
        return None
