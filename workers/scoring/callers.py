"""Runs the async reward functions of a reward worker in one process, many requests at a time, and replaces the process
when it ends. It has its own fork server, because it may use the network, which the children that read answers may not.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from dapo.config.reward import RemoteConfig
from workers.scoring.process import MAX_FAILED_STARTS, READ_ERRORS, Child, ForkServer, pause
from workers.scoring.verdict import CHANGED, CanaryError, ChildrenLost, Verdict, verdict_of_failure


class Callers:
    """The process. respawned: number of replacements."""

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
