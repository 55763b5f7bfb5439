"""Keeps one engine's place on the driver: its Ray actor, whatever replaces it, and what it holds.

In: Ray options and the arguments of vLLM. Out: an actor that runs, why it is lost, and another one in its place.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray

from dapo.config.sampling import RolloutConfig
from dapo.faults.restarts import Restarts
from dapo.report.watchdog import Member
from workers.capacity import EngineSize
from workers.engines.load import Follower
from workers.engines.worker import RolloutWorker
from workers.remote import RemoteError, WorkerLost, wait

PULSE_S = 0.5  # between two signs of life
Gpus = Callable[[int], Sequence[str]]  # of an engine, by its number; none: those that Ray has given to it
MISSED = 4  # pulses in a row that tell of an actor that stands still, and not of a driver that did


class EngineSlot:
    """Holds one engine. requests: responses that it runs or that wait in it. serving: it holds the weights of the
    version that all serve. version: that one. proven: it has not started again, or was compared with the actors since.
    compared: how often, the engines before it in its place included. rested: it has slept since it started. lent: it is
    on the actors' GPUs while others have GPUs of their own. limit: on its restarts. follower: of what it does.
    """

    def __init__(
        self, number: int, options: dict[str, Any], cfg: RolloutConfig, *, count: int = 1, lent: bool = False
    ) -> None:
        """Makes the engine's actor. options: Ray's, from `workers.placement`. count: of all engines."""
        self.number = number
        self.lent = lent
        self._count = count
        self.load = 0  # responses that it runs now
        self.size: EngineSize | None = None
        self.serving = False
        self.version = 0
        self.proven, self.rested = True, False
        self.restarts = self.compared = 0
        self._options, self._beside_ranks = options, options.get("num_gpus", 1) < 1
        self._as_before: dict[str, int] = {}  # arguments of vLLM where it starts again
        self._cfg = cfg
        self._heard_of = time.monotonic()  # when it last computed, or had nothing to
        self.limit = Restarts(cfg.max_restarts)
        self.follower = Follower()
        self._make()

    def _make(self) -> None:
        remote: Any = ray.remote(RolloutWorker)
        self.worker: Any = remote.options(max_concurrency=4096, **self._options).remote()

    @property
    def started(self) -> bool:
        """Returns whether the engine runs; it may lack the weights to serve."""
        return self.size is not None

    async def start(self, model_path: str, engine_args: dict[str, Any], gpus: Gpus) -> None:
        """Loads the model. gpus: tells which ones of its node the engine uses. Raises RemoteError when that fails or
        takes longer than `rollout.start_timeout_s`.

        Beside ranks it later takes the KV cache of its first start, when there were none: vLLM measures what is free,
        and fails or errs where ranks take or free memory meanwhile.
        """
        try:
            there = await asyncio.to_thread(gpus, self.number)  # it may wait for a node
        except RuntimeError as error:
            raise RemoteError(f"engine {self.number} has no GPUs to start on: {error}") from error
        started = self.worker.start.remote(model_path, self._as_before | engine_args, there)
        [self.size] = await wait(
            [started], self._cfg.start_timeout_s, self.member("to start"), "rollout.start_timeout_s"
        )
        if self._beside_ranks and self.size is not None and self.size.cache_bytes:
            self._as_before = {"kv_cache_memory_bytes": self.size.cache_bytes}
        self._heard_of = time.monotonic()

    def member(self, act: str = "") -> Member:
        """Names this engine among all, for a wait. act: `to start` for example."""
        return Member(role="engine", number=self.number, count=self._count, act=act)

    def silent(self) -> float:
        """Returns for how many seconds it has computed nothing although it should, as far as that is known."""
        return time.monotonic() - self._heard_of if self.load else 0.0

    def doing(self) -> str:
        """Returns what it does, in words."""
        return f"{self.load} requests, version {self.version}, last token {self.silent():.0f} s ago"

    async def until_lost(self) -> str:
        """Returns why the engine is lost, when it is: its process has ended, or stands still for
        `rollout.stall_timeout_s`.
        """
        limit = self._cfg.stall_timeout_s
        missed = 0
        while missed < MISSED:
            await asyncio.sleep(PULSE_S)
            try:
                if stands_still := await self.stands_still(limit / MISSED, limit):
                    return stands_still
                missed = 0
            except WorkerLost as error:
                return str(error)
            except RemoteError:
                missed += 1
        return f"its actor gave no sign of life for {limit:g} s (`rollout.stall_timeout_s`)"

    async def stands_still(self, timeout_s: float, limit: float) -> str:
        """Returns in words that the engine does nothing for `limit` seconds although it should, or "".

        Raises:
            RemoteError: its actor does not answer within `timeout_s`. WorkerLost: it never will.
        """
        what = f"a sign of life from engine {self.number}"
        [pulse] = await wait([self.worker.pulse.remote()], timeout_s, what, "rollout.stall_timeout_s")
        self._heard_of = time.monotonic() - max(pulse.idle_s, pulse.silent_s)
        self.follower.heard(pulse.counts)
        if pulse.silent_s > limit:
            return f"its process has not answered for {pulse.silent_s:.0f} s"
        if pulse.idle_s > limit > 0:
            return f"{pulse.requests} requests run, and the last token is {pulse.idle_s:.0f} s old"
        return ""

    async def answers(self, grace_s: float) -> bool:
        """Returns whether the engine's process answers within `grace_s`; not that of another one in its place."""
        end, worker = time.monotonic() + grace_s, self.worker
        while self.started and self.worker is worker and (left := end - time.monotonic()) > 0:
            try:
                if not await self.stands_still(left, limit=0.0):
                    return True
            except RemoteError:
                return False
            await asyncio.sleep(min(PULSE_S, left))
        return False

    async def sleep(self, level: int) -> None:
        """Lets the engine give its memory back until the next weight sync. Raises RemoteError where it does not."""
        limit_s = self._cfg.stall_timeout_s
        call = self.worker.sleep.remote(level)
        await wait([call], limit_s, self.member("to sleep"), "rollout.stall_timeout_s")

    async def stop(self, grace_s: float) -> None:
        """Lets the engine end its processes for `grace_s`, then kills what is left."""
        with suppress(RemoteError):
            await wait([self.worker.stop.remote()], grace_s, self.member("to stop"), "")
        self.drop()

    def drop(self) -> None:
        """Kills the engine, or what is left of it."""
        self.serving, self.size = False, None
        ray.kill(self.worker)

    async def restart(self, model_path: str, engine_args: dict[str, Any], gpus: Gpus) -> None:
        """Puts another engine in the place of one that was dropped. Raises RemoteError, and then it is dropped too."""
        self.limit.add()
        self.restarts += 1
        self.proven, self.rested, self.follower = False, False, Follower()
        self._make()
        try:
            await self.start(model_path, engine_args, gpus)
        except RemoteError:
            self.drop()
            raise
