"""Feeds, limits, checks and replaces the child processes of one reward worker: one `Verdict` per `Item`, whatever the
item does to the process that scores it. Plain asyncio; needs no Ray."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from dapo.config.reward import LimitsConfig, RemoteConfig
from dapo.rewards.calling.by_entry import Own, Specs, as_values
from dapo.rewards.calling.fork_server import Item
from dapo.rewards.calling.process import MAX_FAILED_STARTS, READ_ERRORS, Child, ForkServer, pause
from dapo.workers.scoring.verdict import (
    CHANGED,
    LIMIT_REACHED,
    CanaryError,
    ChildrenLost,
    Verdict,
    verdict_at_limit,
    verdict_from_reply,
    verdict_of_failure,
)

CANARY_EVERY = 1000  # items of one child between two checks with known answers
TOLERANCE = 1e-6  # absolute, of a known score


class Callers:
    """Runs the async reward functions in one process, many requests at a time, and replaces the process when it ends.
    It has its own fork server, because it may use the network, which the children that read answers may not. respawned:
    number of replacements."""

    def __init__(self, settings: Mapping[str, Any], remote: RemoteConfig, concurrency: int) -> None:
        """settings: of the worker's fork server. remote: its `calls_per_minute` is this worker's share."""
        self.respawned = 0
        limits = {**settings["limits"], "allow_network": True}
        self._settings = {**settings, "limits": limits, "remote": asdict(remote)}
        self._silence_s = float(limits["wall_s"])
        self._asks: dict[str, bool] = {"": True}  # by entry of `data.sources`, "" for all others
        self._digest = ""
        self._server: ForkServer | None = None
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(concurrency)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = self._failed_starts = 0
        self._listener: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        server = [] if self._server is None or self._server.gone.is_set() else [self._server.about["pid"]]
        return server + ([] if self._child is None else [self._child.pid])

    async def start(self) -> None:
        """Waits until the functions are imported and the process runs. Raises ValueError, RuntimeError or OSError."""
        self._server = await ForkServer.start(self._settings)
        self._asks, self._digest = self._server.about["asks"], self._server.about["digest"]
        await self._running_child()

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        if self._child is not None:
            self._child.end("crash")
        if self._server is not None:
            self._server.kill()
        for waiter in self._waiting.values():
            waiter.cancel()

    async def given(self, request: dict[str, Any]) -> dict[str, Any] | Verdict:
        """Returns each function's result by label, or a verdict if the process failed. Returns at once if the request's
        entry has no async function. Raises ChildrenLost if the process repeatedly fails to start, CanaryError if it
        would run other functions."""
        if not self._asks.get(request["entry"], self._asks[""]):
            return {}
        async with self._slots:
            began = time.monotonic()
            reply = await self._ask(request)
        if "failure" in reply:
            wall_s, after_s = time.monotonic() - began, float(reply.get("after_s", 0.0))
            return verdict_of_failure(reply["failure"], reply["detail"], wall_s, after_s)
        return dict(reply["given"])

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns `given`, or a kind of `failure` and its `detail`."""
        try:
            child = await self._running_child()
        except (CanaryError, ChildrenLost):
            raise
        except (RuntimeError, ValueError, OSError) as error:
            return {"failure": "crash", "detail": str(error)}
        self._number += 1
        number = self._number
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            with suppress(ConnectionError):  # the listener detects its end
                child.send({**request, "number": number})
            return await waiter
        finally:
            self._waiting.pop(number, None)

    async def _running_child(self) -> Child:
        async with self._starting:
            if self._child is not None:
                return self._child
            if self._failed_starts:
                await pause(self._failed_starts)
            try:
                if self._server is None or self._server.gone.is_set():
                    self._server = await ForkServer.start(self._settings)
                if self._server.about["digest"] != self._digest:
                    raise CanaryError(CHANGED)
                self._child = await self._server.fork()
            except CanaryError:
                raise
            except (RuntimeError, ValueError, OSError) as error:
                self._failed_starts += 1
                if self._failed_starts >= MAX_FAILED_STARTS:
                    raise ChildrenLost(
                        f"the process of the async reward functions did not start {self._failed_starts} times in a "
                        f"row; the last time: {error}"
                    ) from error
                raise
            self._listener = asyncio.create_task(self._listen(self._child))
            return self._child

    async def _listen(self, child: Child) -> None:
        """Delivers replies until the process ends or is silent, which means that a function blocks the event loop."""
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    reply = await child.receive()
                waiter = self._waiting.pop(reply["number"], None)
                if waiter is not None and not waiter.done():
                    self._failed_starts = 0
                    waiter.set_result(reply)
        except TimeoutError:
            child.end("wall")
            detail = "an async reward function blocked its event loop for `reward.limits.wall_s`: it must await"
        except READ_ERRORS:
            detail = f"the process of the async reward functions ended ({await child.cause_of_end()})"
            child.end("crash")
        self._child = None
        self.respawned += 1
        self._failed_starts += 1
        # It is unknown which request ended it: all are tried once more, as after a crash.
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result({"failure": child.failure, "detail": detail})
        self._waiting.clear()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Job:
    item: Item
    given: dict[str, Any]
    done: "asyncio.Future[Verdict]"


class Children:
    """`count` children, each with a task that feeds and replaces it. `async with` starts and ends them. granted: which
    restrictions of `processes` and `network` the kernel granted."""

    def __init__(
        self,
        functions: Specs,
        limits: LimitsConfig,
        count: int,
        remote: RemoteConfig | None = None,
        concurrency: int = 1,
        *,
        own: Own | None = None,
    ) -> None:
        """remote, concurrency: for async functions, which run in one more process. own: functions by entry of
        `data.sources`."""
        self._respawned, self.granted = 0, list[str]()
        self._limits = limits
        self._settings = {"functions": as_values(functions, own or {}), "limits": asdict(limits)}
        self._remote, self._concurrency = remote or RemoteConfig(), concurrency
        self._callers: Callers | None = None
        self._count = count
        self._server: ForkServer | None = None
        self._restarting = asyncio.Lock()
        self._children: set[Child] = set()
        self._backlog: deque[_Job] = deque()
        self._waiting: deque[asyncio.Future[_Job | None]] = deque()
        self._open: set[_Job] = set()
        self._broken: CanaryError | ChildrenLost | None = None
        self._failed_starts = 0  # in a row, over all slots
        self._up = asyncio.Event()
        self._slots: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Children":
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Waits until every child has scored the known answers. Raises ValueError if a reward function cannot be
        loaded, CanaryError if a known answer gets another score, ChildrenLost if children repeatedly fail to start."""
        self._server = await ForkServer.start(self._settings)
        if self.about["asynchronous"]:
            self._callers = Callers(self._settings, self._remote, self._concurrency)
            await self._callers.start()
        self._slots = [asyncio.create_task(self._slot()) for _ in range(self._count)]
        for slot in self._slots:
            slot.add_done_callback(self._slot_ended)
        await self._up.wait()
        self._raise_if_broken()

    async def close(self) -> None:
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        for job in list(self._open):
            job.done.cancel()
        if self._callers is not None:
            await self._callers.close()
        if self._server is not None:
            self._server.kill()

    @property
    def respawned(self) -> int:
        return self._respawned + (self._callers.respawned if self._callers is not None else 0)

    @property
    def about(self) -> dict[str, Any]:
        """The fork server's description of the functions: see `ForkServer`."""
        return self._server.about if self._server is not None else {}

    @property
    def pids(self) -> list[int]:
        """Process ids of the living children and of the process of the async functions, with its fork server."""
        return [child.pid for child in self._children] + (self._callers.pids if self._callers is not None else [])

    def processes(self) -> Iterator[psutil.Process]:
        for pid in (os.getpid(), self.about["pid"], *self.pids):
            with suppress(psutil.Error):
                yield psutil.Process(pid)

    async def score(self, item: Item) -> Verdict:
        """Returns the verdict on one item; calls may be concurrent. Raises CanaryError if the children failed a check
        of known answers, ChildrenLost if children repeatedly fail to start."""
        self._raise_if_broken()
        given = {} if self._callers is None else await self._callers.given(item.request(None, servers=item.servers))
        if isinstance(given, Verdict):
            return given
        job = _Job(item=item, given=given, done=asyncio.get_running_loop().create_future())
        self._open.add(job)
        job.done.add_done_callback(lambda _: self._open.discard(job))
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(job)
                break
        else:
            self._backlog.append(job)
        return await job.done

    async def check(self) -> None:
        """Makes every child that scored since its last check score the known answers again. Raises as `score` does."""
        self._raise_if_broken()
        checks = []
        for child in self._children:
            if child.since_canary:
                if child.check_wanted is None:
                    child.check_wanted = asyncio.get_running_loop().create_future()
                checks.append(child.check_wanted)
                child.wake()
        await asyncio.gather(*checks)
        self._raise_if_broken()

    async def _slot(self) -> None:
        retry: _Job | None = None
        while (child := await self._new_child()) is not None:
            self._children.add(child)
            if len(self._children) == self._count:
                self._up.set()
            try:
                retry = await self._feed_until_end(child, retry)
            finally:
                self._children.remove(child)
                child.end("crash")
                if child.check_wanted is not None and not child.check_wanted.done():
                    child.check_wanted.set_result(None)  # its replacement is checked before it scores
            self._respawned += 1

    async def _new_child(self) -> Child | None:
        """Returns a child that has scored the known answers; None if the worker is broken."""
        while self._broken is None:
            try:
                server = await self._running_server()
                child = await server.fork()
                self.granted = child.granted
                if await self._canary(child):
                    self._failed_starts = 0
                    return child
                reason = f"in the known answers {child.detail}"
                child.end("crash")
            except (RuntimeError, ValueError, OSError) as error:
                reason = str(error)
            self._failed_starts = count = self._failed_starts + 1
            if count >= MAX_FAILED_STARTS * self._count:
                self._break(ChildrenLost(f"{count} reward children in a row did not come to score; the last: {reason}"))
            elif self._up.is_set():
                await pause(-(-count // self._count))
        return None

    async def _running_server(self) -> ForkServer:
        async with self._restarting:
            if self._server is None or self._server.gone.is_set():
                before, self._server = self.about, await ForkServer.start(self._settings)
                if before["digest"] != self.about["digest"]:
                    self._break(CanaryError(CHANGED))
            return self._server

    async def _feed_until_end(self, child: Child, retry: _Job | None) -> _Job | None:
        """Feeds items to a child until it ends. Returns the item that the next child must score again, if any. retry:
        the first item. An item that reaches a limit in a process that has scored others is retried, because the others
        may have left memory or threads behind. If it reaches the limit in a fresh process, the item is the cause."""
        while not child.exit_status.done() and not child.failure:
            if child.check_wanted is not None or child.since_canary >= CANARY_EVERY:
                if not await self._canary(child):
                    break
                continue
            job, retry = retry or await self._next_job(child), None
            if job is None:
                continue
            shared = ("memory", "cpu") if child.has_threads else ("memory",) if child.scored else ()
            verdict = await self._ask(child, job)
            if verdict.score.failure in shared:
                return job
            if not job.done.done():
                job.done.set_result(verdict)
        return retry

    async def _next_job(self, child: Child) -> _Job | None:
        """Returns None if the child ended, or must be checked, before there was one."""
        while self._backlog:
            job = self._backlog.popleft()
            if not job.done.done():
                return job
        waiter: asyncio.Future[_Job | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        child.wake = lambda: None if waiter.done() else waiter.set_result(None)
        return await waiter

    async def _ask(self, child: Child, job: _Job) -> Verdict:
        began = time.monotonic()
        reply = await child.ask({**job.item.request(self.about["reads_last"]), "given": job.given}, self._limits)
        wall_s = time.monotonic() - began
        child.scored += 1
        child.since_canary += 1
        try:
            if reply is not None:
                return verdict_from_reply(reply, wall_s)
        except ValueError:  # a function has written to the socket
            child.end("crash")
        if child.failure in LIMIT_REACHED:
            at = self.about["at_limit"]
            return verdict_at_limit(child.failure, at.get(job.item.entry, at[""]), self._limits.cpu_s, wall_s)
        return verdict_of_failure(child.failure, child.detail, wall_s)

    async def _canary(self, child: Child) -> bool:
        """Whether the child scores all known answers correctly. A wrong score breaks the worker; a child that ends
        while scoring one does not."""
        for request in self.about["canaries"]:
            reply = await child.ask(request, self._limits)
            if reply is None:
                return False
            expected, got = request["canary"]["score"], reply.get("score", reply.get("error"))
            if not isinstance(got, float) or not abs(got - expected) <= TOLERANCE:
                self._break(CanaryError.of_answer(request, got))
                return False
        child.since_canary = 0
        if child.check_wanted is not None and not child.check_wanted.done():
            child.check_wanted.set_result(None)
        child.check_wanted = None
        return True

    def _break(self, error: CanaryError | ChildrenLost) -> None:
        self._broken = self._broken or error
        for job in list(self._open):
            if not job.done.done():
                job.done.set_exception(self._broken)
        self._backlog.clear()
        self._up.set()

    def _slot_ended(self, slot: "asyncio.Task[None]") -> None:
        """Breaks the worker on an internal error, so that items do not wait forever."""
        if not slot.cancelled() and (error := slot.exception()) is not None:
            self._break(CanaryError(f"the task that feeds reward children failed: {type(error).__name__}: {error}"))

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken
