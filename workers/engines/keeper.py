"""Keeps engines running: starts them, replaces lost ones, and drops those lost too often. Puts engines that share GPUs
with the actors to sleep while the actors train, at the deepest level of vLLM's sleep that is known to work."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dapo.config.sampling import RolloutConfig
from dapo.ground.restarts import Restarts
from dapo.ground.watchdog import waiting
from dapo.workers.engines.load import engine_metrics
from dapo.workers.engines.slot import LEAVES, EngineSlot, Gpus
from dapo.workers.remote import RemoteError, wait_for_all
from dapo.workers.supervise import PAUSE_S, keep_up

Empty = Callable[[EngineSlot], Awaitable[None]]
LONGEST_PAUSE_S = 60.0
DEEPEST, LIGHTEST = 2, 1  # levels of vLLM's sleep: without weights, with weights on the host


class Keeper:
    """All engine slots.

    changed: set, then replaced, whenever an engine may serve or none ever will. exhausted: why the run cannot go on.
    joins: limit of engines that could not join. turn: set while the engines, not the actors, own the GPUs that both
    share; engines on shared GPUs start only then. Those are the lent engines, or all engines if none is lent. level: of
    vLLM's sleep, decided by the first comparison with the actors after a sleep. level_proven: engines that slept at
    this level computed the same as the actors.
    """

    def __init__(
        self,
        options: Sequence[dict[str, Any]],
        cfg: RolloutConfig,
        warn: Callable[[str], None],
        release: Callable[[int], None],
        rejoin: Callable[[int], Awaitable[None]],
        lent: int = 0,
    ) -> None:
        """options: Ray options of each engine. release: frees the placement of an engine that is dropped for good.
        rejoin: gives a restarted engine the weights that the others serve. lent: number of engines, the last ones, that
        run on GPUs lent by the actors."""
        count = len(options)
        self.slots = [
            EngineSlot(number, each, cfg, count=count, lent=number >= count - lent)
            for number, each in enumerate(options)
        ]
        self._per_gpu = cfg.engines_per_gpu if any(each.get("num_gpus", 1) < 1 for each in options) else 1
        self.lends = lent > 0
        self.changed = asyncio.Event()
        self.exhausted = ""
        self._give_weights = rejoin
        self.turn = asyncio.Event()
        self.turn.set()
        self.level, self.level_proven = DEEPEST, False
        self.joins = Restarts(max(1, cfg.max_restarts))
        self._slept = False
        self._starting = self._joined = self._gone_restarts = 0
        self._cfg = cfg
        self._warn = warn
        self._release = release
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, model_path: str, engine_args: dict[str, Any], gpus: Gpus) -> None:
        """Starts all engines in parallel, retrying failures. Where engines share a GPU the first of them starts alone,
        and the others take its KV cache size: vLLM measures it by the GPU's free memory. Raises RemoteError if one does
        not start."""
        self._arguments = model_path, engine_args, gpus
        first = self.slots[:: self._per_gpu]
        await wait_for_all(self._start(slot, model_path, engine_args, gpus) for slot in first)
        if others := [slot for slot in self.slots if slot not in first]:
            for slot in others:
                slot.as_large_as(first[slot.number // self._per_gpu])
            await wait_for_all(self._start(slot, model_path, engine_args, gpus) for slot in others)
        for slot in self.slots:
            slot.serving = True
            self._watches.append(asyncio.create_task(self._watch(slot, model_path, engine_args, gpus)))

    def join(self, options: dict[str, Any]) -> int:
        """Starts one engine more beside the others, and returns its number, which one that is gone may have had. It
        serves when it has the weights that they serve, and has been compared with the actors."""
        number = next((slot.number for slot in self.slots if slot.gone), len(self.slots))
        slot = EngineSlot(number, options, self._cfg, count=len(self.slots) + 1)
        slot.proven = False
        self._gone_restarts += sum(before.restarts for before in self.slots[number : number + 1])
        self.slots[number : number + 1] = [slot]
        self._watches[number : number + 1] = [asyncio.create_task(self._join(slot))]
        return number

    async def _join(self, slot: EngineSlot) -> None:
        try:
            await self._start(slot, *self._arguments)
        except RemoteError as error:
            self.joins.add()
            more = "; no more are started" if self.joins.spent() else ""
            self._warn(f"engine {slot.number} does not join: {error}{more}")
            slot.leaving = True
            self._free(slot)
            return
        self.joins.worked()
        await self._rejoin(slot)
        await self._watch(slot, *self._arguments)

    def retire(self, slot: EngineSlot) -> None:
        """Gives an engine no more groups, and does not replace it if it is lost."""
        slot.serving, slot.leaving = False, True
        self._watches[slot.number].cancel()
        self.notify()

    async def end(self, slot: EngineSlot, grace_s: float) -> None:
        """Ends an engine that leaves; what still runs on it is repeated by others."""
        await slot.stop(grace_s)
        self._free(slot)
        self.notify()

    def _free(self, slot: EngineSlot) -> None:
        """Frees the place and the number of an engine that is gone."""
        self._release(slot.number)
        slot.gone = True

    def listen(self, options: dict[str, Any], empty: Empty, supply: Callable[[int], Awaitable[None]]) -> None:
        """Lets engines outside of the Ray cluster join, come back and leave. options: of Ray, for the actors that speak
        for them. empty: takes the groups off an engine that leaves. supply: brings it every version of the weights,
        until it is cancelled."""
        for _ in range(self._cfg.outside.engines):
            number = len(self.slots)
            slot = EngineSlot(number, options, self._cfg, count=number + 1, outside=True)
            self.slots.append(slot)
            self._watches.append(asyncio.create_task(self._attend(slot, empty, supply)))

    async def _attend(self, slot: EngineSlot, empty: Empty, supply: Callable[[int], Awaitable[None]]) -> None:
        """Whatever fails, the engine may come again, so that only the pause grows."""
        pause = PAUSE_S
        while True:
            slot.proven, slot.version = False, -1
            supplying: asyncio.Future[None] | None = None
            try:
                await slot.until_connected(self._warn)
                await slot.start(*self._arguments)
                supplying = asyncio.ensure_future(supply(slot.number))
                lost = asyncio.ensure_future(slot.until_lost())
                await asyncio.wait({lost, supplying}, return_when=asyncio.FIRST_COMPLETED)
                pause = PAUSE_S if slot.proven else pause
                lost.cancel()
                reason = lost.result() if lost.done() else str(supplying.exception())
                if reason == LEAVES:
                    await empty(slot)
            except RemoteError as error:
                reason = str(error)
            finally:
                if supplying is not None:
                    supplying.cancel()
            self._warn(f"engine {slot.number}, outside of the cluster, is gone: {reason}")
            slot.renew()
            self.notify()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _start(self, slot: EngineSlot, *arguments: Any) -> None:
        """Starts an engine for the first time, with the usual restart limit. A failure that repeats with the same
        message, such as a wrong argument, is not retried."""
        before, start = "", slot.start
        while not slot.started:
            try:
                await start(*arguments)
            except RemoteError as error:
                slot.drop()
                if slot.limit.spent() or str(error) == before:
                    raise
                before, start = str(error), slot.restart
                slot.limit.add()
                self._warn(f"engine {slot.number} did not start, and is started again: {error}")
                await asyncio.sleep(PAUSE_S)
        slot.limit.worked()

    async def _watch(self, slot: EngineSlot, *arguments: Any) -> None:
        async def until_lost() -> str:
            reason = await slot.until_lost()
            slot.drop()
            return reason

        name = f"engine {slot.number}"
        restart, rejoin = partial(self._restart, slot, *arguments), partial(self._rejoin, slot)
        await keep_up(name, slot.limit, until_lost, restart, self._warn, rejoin)
        self._give_up(slot)

    async def _restart(self, slot: EngineSlot, *arguments: Any) -> None:
        with waiting(f"the actors to leave their GPUs to engine {slot.number}, which starts again"):
            while self.takes_turns(slot) and not self.turn.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.turn.wait(), self._cfg.timeout_s)
        self._starting += self.takes_turns(slot)
        try:
            await slot.restart(*arguments)
        finally:
            self._starting -= self.takes_turns(slot)
            self.notify()

    def takes_turns(self, slot: EngineSlot) -> bool:
        """Whether the engine shares its GPUs with the actors."""
        return slot.lent or not self.lends

    async def sleep(self) -> None:
        """Puts all engines that share GPUs to sleep, and starts none of them until `turn` is set again. Waits for an
        engine that is starting; drops one that fails to sleep, to be replaced later. Until the sleep level is proven,
        every engine is compared with the actors before it serves again."""
        if not self.level_proven:
            for slot in filter(self.takes_turns, self.slots):
                slot.proven = False
        self._slept = True
        self.turn.clear()
        while self._starting:  # each start has its deadline
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), self._cfg.start_timeout_s)
        slots = [slot for slot in self.slots if slot.started and self.takes_turns(slot)]
        for slot in slots:
            slot.serving = False
        await asyncio.gather(*[self._put_to_sleep(slot) for slot in slots])

    async def _put_to_sleep(self, slot: EngineSlot) -> None:
        try:
            await slot.sleep(self.level)
            slot.rested = True
        except RemoteError as error:
            self._warn(f"engine {slot.number} does not sleep, and is dropped: {error}")
            slot.drop()

    async def sleep_lighter(self, why: str) -> bool:
        """Puts the engines to sleep again, with their weights kept on the host from now on. Returns False if they never
        slept, have served correctly after a sleep, or keep their weights already."""
        if not self._slept or self.level_proven or self.level == LIGHTEST:
            return False
        self._warn(f"engines keep a copy of their weights on the host while they sleep (level 1): {why}")
        self.level = LIGHTEST
        await self.sleep()
        return True

    def served(self, members: Sequence[int]) -> None:
        """Records that these engines serve: they own their GPUs, and agree with the actors. If some engines are lent
        GPUs, but none of these, does nothing."""
        if self.lends and not any(self.slots[number].lent for number in members):
            return
        self.level_proven |= any(self.slots[number].rested for number in members)
        self.turn.set()

    async def _rejoin(self, slot: EngineSlot) -> None:
        """Lets a restarted engine serve. An engine that fails to join the weight sync twice is dropped: if no other one
        serves, there would be no batch and no later sync. Errors other than RemoteError are only logged: a failure of
        the actors is handled elsewhere."""
        for another in (True, False):
            try:
                await self._give_weights(slot.number)
                if slot.serving:
                    self._joined += not slot.restarts
                    joined = f"has joined, and serves ({self._joined} have joined so far)"
                    how = f"serves again (restart {slot.restarts})" if slot.restarts else joined
                    self._warn(f"engine {slot.number} {how}")
                return
            except Exception as error:
                self._warn(f"engine {slot.number} could not join the weight sync: {type(error).__name__}: {error}")
                if not isinstance(error, RemoteError):
                    return
                if not another:
                    slot.drop()

    def _give_up(self, slot: EngineSlot) -> None:
        self._warn(f"engine {slot.number} was started {slot.limit.most} times in an hour or in a row, and is given up")
        self._release(slot.number)
        kept = zip(self.slots, self._watches, strict=True)
        left = sum(
            not watch.done()
            for other, watch in kept
            if not other.lent and not other.outside and not other.leaving and other is not slot
        )
        if left < self._cfg.min_engines:
            self.exhausted = (
                f"{left} engines are left, and `rollout.min_engines` asks for {self._cfg.min_engines}: the others were "
                f"lost more often than `rollout.max_restarts` ({self._cfg.max_restarts}) within an hour"
            )
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def members(self, *, lent: bool = False) -> tuple[int, ...]:
        """Returns the running engines that can take part in a weight sync: the lent ones, or the others."""
        there = (slot for slot in self.slots if slot.started and not slot.leaving and not slot.outside)
        return tuple(slot.number for slot in there if slot.lent == lent)

    async def lose_silent(self, members: Sequence[int], grace_s: float) -> bool:
        """Drops those of these engines that have ended or do not answer within `grace_s`; returns whether there are
        any. Their watch tasks replace them."""
        asked = [(slot, slot.worker) for slot in map(self.slots.__getitem__, members)]
        answers = await asyncio.gather(*[slot.answers(grace_s) for slot, _ in asked])
        for (slot, worker), there in zip(asked, answers, strict=True):
            if not there and slot.started and slot.worker is worker:  # and not another one already
                slot.drop()
        return not all(answers)

    def tokens_per_s(self) -> float:
        return sum(slot.follower.tokens_per_s() for slot in self.slots)

    def lap(self, gpus_per_engine: float) -> dict[str, float]:
        """Returns metrics of the engines since the last lap, from their pulses, and the total number of restarts.
        gpus_per_engine: 0 on a CPU."""
        laps = {slot.number: lap for slot in self.slots if (lap := slot.follower.lap()) is not None}
        lent = {slot.number for slot in self.slots if slot.lent}
        restarts = {"perf/restarted_engines": float(self._gone_restarts + sum(slot.restarts for slot in self.slots))}
        return restarts | engine_metrics(laps, gpus_per_engine, lent)

    async def stop(self, grace_s: float) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*[slot.stop(grace_s) for slot in self.slots])
