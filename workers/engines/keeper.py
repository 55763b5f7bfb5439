"""Keeps engines running: watches over them, replaces those that are lost, gives up those that are lost too often, and
lets those sleep that share GPUs with the actors while these train, as deep as is known to be safe.

In: slots. Out: which engines run, and since which start; a reason when too few are left.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from dapo.config.sampling import RolloutConfig
from dapo.report.watchdog import waiting
from workers.engines.load import engine_metrics
from workers.engines.slot import EngineSlot, Gpus
from workers.remote import RemoteError, wait_for_all

PAUSE_S = 1.0  # before an engine that could not be started is tried again
DEEPEST, LIGHTEST = 2, 1  # levels of vLLM's sleep: without weights, with weights on the host


class Keeper:
    """Holds the slots. changed: set, and replaced, whenever an engine may serve or none will. exhausted: why the run
    cannot go on. rejoin: gives an engine that starts again its weights; set before the first group is generated. turn:
    set while the engines, and not the actors, have the GPUs that both share; none that shares them starts otherwise:
    those that are lent GPUs, or all where none is. level: of vLLM's sleep, decided by the first comparison with the
    actors after it; level_proven: engines that slept at it served what the actors compute.
    """

    def __init__(
        self,
        options: Sequence[dict[str, Any]],
        cfg: RolloutConfig,
        warn: Callable[[str], None],
        release: Callable[[int], None],
        lent: int = 0,
    ) -> None:
        """Makes the engines' actors. options: Ray options of each engine. release: gives the place of an engine back
        that is given up. lent: how many of them, the last ones, are lent the actors' GPUs."""
        count = len(options)
        self.slots = [
            EngineSlot(number, each, cfg, count=count, lent=number >= count - lent)
            for number, each in enumerate(options)
        ]
        self.lends = lent > 0
        self.changed = asyncio.Event()
        self.exhausted = ""
        self.rejoin: Callable[[int], Awaitable[None]] | None = None
        self.turn = asyncio.Event()
        self.turn.set()
        self.level, self.level_proven = DEEPEST, False
        self._slept = False
        self._starting = 0
        self._cfg = cfg
        self._warn = warn
        self._release = release
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, model_path: str, engine_args: dict[str, Any], gpus: Gpus) -> None:
        """Starts all engines side by side, and those that fail again. Raises RemoteError where one does not start."""
        await wait_for_all(self._start(slot, model_path, engine_args, gpus) for slot in self.slots)
        for slot in self.slots:
            slot.serving = True
            self._watches.append(asyncio.create_task(self._watch(slot, model_path, engine_args, gpus)))

    async def _start(self, slot: EngineSlot, *arguments: Any) -> None:
        """Starts an engine for the first time: as often as one that is lost, but not after a failure that comes again
        in the same words, as a wrong argument's does."""
        before, start = "", slot.start
        while not slot.started:
            try:
                await start(*arguments)
            except RemoteError as error:
                slot.drop()
                if slot.limit.spent() or str(error) == before:
                    raise
                before, start = str(error), slot.restart
                self._warn(f"engine {slot.number} did not start, and is started again: {error}")
                await asyncio.sleep(PAUSE_S)
        slot.limit.worked()

    async def _watch(self, slot: EngineSlot, *arguments: Any) -> None:
        """Replaces an engine whenever it is lost, as long as `rollout.max_restarts` allows it."""
        while True:
            reason = await slot.until_lost()
            self._warn(f"engine {slot.number} is lost: {reason}")
            slot.drop()
            while not slot.started:
                if slot.limit.spent():
                    self._give_up(slot)
                    return
                try:
                    await self._restart(slot, *arguments)
                except RemoteError as error:
                    self._warn(f"engine {slot.number} did not start again: {error}")
                    await asyncio.sleep(PAUSE_S)
            slot.limit.worked()
            await self._rejoin(slot)

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
        """Returns whether the engine's GPUs are the actors' in their turn."""
        return slot.lent or not self.lends

    async def sleep(self) -> None:
        """Lets all engines that share GPUs sleep, and starts none of them until `turn` is set again. One that starts at
        this moment is waited for; one that does not sleep is dropped, so that another takes its place later. As long as
        the level is not proven, every engine is compared with the actors before it serves again."""
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
        """Lets the engines sleep again, but keep their weights on the host from now on; returns False where they have
        never slept, have served well after it, or keep them already."""
        if not self._slept or self.level_proven or self.level == LIGHTEST:
            return False
        self._warn(f"engines keep a copy of their weights on the host while they sleep (level 1): {why}")
        self.level = LIGHTEST
        await self.sleep()
        return True

    def served(self, members: Sequence[int]) -> None:
        """Notes that these engines serve: the GPUs are theirs, and they compute what the actors do. Without any that
        shares GPUs, those that are lent none are not concerned."""
        if self.lends and not any(self.slots[number].lent for number in members):
            return
        self.level_proven |= any(self.slots[number].rested for number in members)
        self.turn.set()

    async def _rejoin(self, slot: EngineSlot) -> None:
        """Lets an engine that has started again serve; one that cannot join the weight sync, twice, is dropped: where
        no other serves, there would be no batch and no later sync. What ends the actors, theirs takes up."""
        assert self.rejoin is not None
        for another in (True, False):
            try:
                await self.rejoin(slot.number)
                if slot.serving:
                    self._warn(f"engine {slot.number} serves again (restart {slot.restarts})")
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
        left = sum(not watch.done() for other, watch in kept if not other.lent and other is not slot)
        if left < self._cfg.min_engines:
            self.exhausted = (
                f"{left} engines are left, and `rollout.min_engines` asks for {self._cfg.min_engines}: the others were "
                f"lost more often than `rollout.max_restarts` ({self._cfg.max_restarts}) within an hour"
            )
        self.notify()

    def notify(self) -> None:
        """Wakes who waits for an engine."""
        self.changed.set()
        self.changed = asyncio.Event()

    def members(self, *, lent: bool = False) -> tuple[int, ...]:
        """Returns the engines that run, and can take part in a weight sync: those that are lent GPUs, or the others."""
        return tuple(slot.number for slot in self.slots if slot.started and slot.lent == lent)

    async def lose_silent(self, members: Sequence[int], grace_s: float) -> bool:
        """Drops those of these engines that have ended, or answer nothing for `grace_s`; returns whether there are any.

        Their watch puts others in their places.
        """
        asked = [(slot, slot.worker) for slot in map(self.slots.__getitem__, members)]
        answers = await asyncio.gather(*[slot.answers(grace_s) for slot, _ in asked])
        for (slot, worker), there in zip(asked, answers, strict=True):
            if not there and slot.started and slot.worker is worker:  # and not another one already
                slot.drop()
        return not all(answers)

    def tokens_per_s(self) -> float:
        """Returns how many tokens all engines generated a second lately, by their last signs of life."""
        return sum(slot.follower.tokens_per_s() for slot in self.slots)

    def lap(self, gpus_per_engine: int) -> dict[str, float]:
        """Returns what the engines did since the last lap, as far as their signs of life told, and how many were
        replaced so far, as metrics. gpus_per_engine: 0 on a CPU."""
        laps = {slot.number: lap for slot in self.slots if (lap := slot.follower.lap()) is not None}
        lent = {slot.number for slot in self.slots if slot.lent}
        restarts = {"perf/restarted_engines": float(sum(slot.restarts for slot in self.slots))}
        return restarts | engine_metrics(laps, gpus_per_engine, lent)

    async def stop(self, grace_s: float) -> None:
        """Lets the engines end their processes for `grace_s`, then kills what is left."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*[slot.stop(grace_s) for slot in self.slots])
