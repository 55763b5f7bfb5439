"""Driver-side slot of one engine: its Ray actor, the detection of its loss, and its restart."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import ray

from dapo.config.sampling import RolloutConfig
from dapo.ground.restarts import Restarts
from dapo.ground.watchdog import Member
from dapo.workers.capacity import EngineSize
from dapo.workers.engines.load import Follower
from dapo.workers.engines.outside import OutsideWorker
from dapo.workers.engines.worker import RolloutWorker
from dapo.workers.remote import RemoteError, WorkerLost, wait

PULSE_S, PULSES_PER_S = 0.5, 512  # between two pulses of an engine, at least; of all engines together, at most
KNOCK_S = 10.0  # a wait for an engine outside of the cluster, after which those refused are told
LEAVES = "it is told to end where it runs"
Gpus = Callable[[int], Sequence[str]]  # GPUs of an engine, by its number; empty: those that Ray assigned to it
_lives = count()
MISSED = 4  # missed pulses in a row that mean a hanging actor, not a driver that was blocked


class EngineSlot:
    """One engine. load: responses that run or wait in it. serving: it holds the current weights and takes groups.
    version: of its weights. proven: it has not restarted, or has been compared with the actors since. compared: number
    of comparisons, including those of engines before it in this slot. rested: it has slept since its start. lent: it
    runs on the actors' GPUs while other engines have their own. outside: it runs outside of the Ray cluster. leaving:
    it takes no more groups, and ends. gone: it has ended. life: differs for each process that any engine has had.
    limit: its restart limit. follower: counts of its work. node: Ray's id, "" before the first start.
    """

    def __init__(
        self,
        number: int,
        options: dict[str, Any],
        cfg: RolloutConfig,
        *,
        count: int = 1,
        lent: bool = False,
        outside: bool = False,
    ) -> None:
        """Creates the engine's actor. options: Ray options, from `workers.placement`. count: number of all engines."""
        self.number = number
        self.lent, self.outside = lent, outside
        self._count = count
        self.pulse_s = max(PULSE_S, count / PULSES_PER_S)
        self.load = 0
        self.size: EngineSize | None = None
        self.serving = self.leaving = self.gone = False
        self.version = 0
        self.node = ""
        self.proven, self.rested = True, False
        self.restarts = self.compared = self.life = 0
        self._options, self._beside_ranks = options, options.get("num_gpus", 1) < 1
        self._as_before: dict[str, int] = {}  # vLLM arguments for a restart
        self._cfg = cfg
        self._heard_of = time.monotonic()  # when it last computed, or was idle
        self.limit = Restarts(cfg.max_restarts)
        self.follower = Follower()
        self._make()

    def _make(self) -> None:
        remote: Any = ray.remote(OutsideWorker if self.outside else RolloutWorker)
        given = [self._cfg.outside] if self.outside else []
        self.life = next(_lives)
        self.worker: Any = remote.options(max_concurrency=4096, **self._options).remote(*given)

    def as_large_as(self, other: "EngineSlot") -> None:
        """Gives its KV cache the size that the other engine has measured."""
        self._as_before = other._as_before

    @property
    def started(self) -> bool:
        """Whether the engine runs; it may not have the weights to serve yet."""
        return self.size is not None

    async def start(self, model_path: str, engine_args: dict[str, Any], gpus: Gpus) -> None:
        """Loads the model. gpus: returns the GPUs of its node that the engine uses. Raises RemoteError if that fails or
        takes longer than `rollout.start_timeout_s`. If it shares GPUs with ranks, a restart reuses the KV cache size of
        the first start, when no ranks were there: vLLM would measure wrongly or fail while ranks allocate or free
        memory."""
        try:
            there = await asyncio.to_thread(gpus, self.number)  # it may wait for a node
        except RuntimeError as error:
            raise RemoteError(f"engine {self.number} has no GPUs to start on: {error}") from error
        started = self.worker.start.remote(model_path, self._as_before | engine_args, there)
        [self.size] = await wait(
            [started], self._cfg.start_timeout_s, self.member("to start"), "rollout.start_timeout_s"
        )
        assert self.size is not None
        if self._beside_ranks and self.size.cache_bytes:
            self._as_before = {"kv_cache_memory_bytes": self.size.cache_bytes}
        self.node = self.size.node
        self._heard_of = time.monotonic()

    async def until_connected(self, warn: Callable[[str], None]) -> None:
        """Waits for an engine outside of the cluster to connect. warn: told who was refused."""
        here = False
        while not here:
            asked = self.worker.connected.remote(KNOCK_S)
            [(here, refused)] = await wait([asked], 2 * KNOCK_S, f"engine {self.number} to be waited for", "")
            for line in refused:
                warn(f"refused at `rollout.outside.listen`: {line}")

    def renew(self) -> None:
        """Closes the connection of an engine outside of the cluster, and lets it or another one come."""
        self.drop()
        self.proven, self.version, self.follower = False, -1, Follower()
        self._make()

    def member(self, act: str = "") -> Member:
        return Member(role="engine", number=self.number, count=self._count, act=act)

    def silent(self) -> float:
        """Returns the known seconds without computation although it has requests; 0 without requests."""
        return time.monotonic() - self._heard_of if self.load else 0.0

    def doing(self) -> str:
        return f"{self.load} requests, version {self.version}, last token {self.silent():.0f} s ago"

    async def until_lost(self) -> str:
        """Waits until the engine is lost and returns why: its process has ended, or hangs for
        `rollout.stall_timeout_s`."""
        limit = self._cfg.stall_timeout_s
        missed = 0
        while missed < MISSED:
            await asyncio.sleep(self.pulse_s)
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
        """Returns a message if the engine has made no progress for `limit` seconds although it should, else "". Raises
        RemoteError if its actor does not answer within `timeout_s`, WorkerLost if it never will."""
        what = f"a sign of life from engine {self.number}"
        [pulse] = await wait([self.worker.pulse.remote()], timeout_s, what, "rollout.stall_timeout_s")
        if pulse.leaves:
            return LEAVES
        self._heard_of = time.monotonic() - max(pulse.idle_s, pulse.silent_s)
        self.follower.heard(pulse.counts)
        if pulse.silent_s > limit:
            return f"its process has not answered for {pulse.silent_s:.0f} s"
        if pulse.idle_s > limit > 0:
            return f"{pulse.requests} requests run, and the last token is {pulse.idle_s:.0f} s old"
        return ""

    async def answers(self, grace_s: float) -> bool:
        """Whether the engine's process answers within `grace_s`. False if the engine is replaced meanwhile."""
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
        """Releases the engine's memory until the next weight sync. Raises RemoteError if that fails."""
        limit_s = self._cfg.stall_timeout_s
        call = self.worker.sleep.remote(level)
        await wait([call], limit_s, self.member("to sleep"), "rollout.stall_timeout_s")

    async def stop(self, grace_s: float) -> None:
        with suppress(RemoteError):
            await wait([self.worker.stop.remote()], grace_s, self.member("to stop"), "")
        self.drop()

    def drop(self) -> None:
        self.serving, self.size = False, None
        ray.kill(self.worker)

    async def restart(self, model_path: str, engine_args: dict[str, Any], gpus: Gpus) -> None:
        """Starts a new engine in place of a dropped one. If that fails, drops it too and raises RemoteError."""
        self.restarts += 1
        self.proven, self.rested, self.follower = False, False, Follower()
        self._make()
        try:
            await self.start(model_path, engine_args, gpus)
        except RemoteError:
            self.drop()
            raise
