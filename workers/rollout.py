"""Speaks for all vLLM engines on the driver: deals groups out, replaces engines that are lost, hands weights on.

In: groups to generate, aborts. Out: responses. What an engine that dies or stands still was computing,
another one computes again from the same seeds: it comes out alike. What is put down goes on from its tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from dapo.config.sampling import RolloutConfig
from dapo.derived import gpus_per_engine
from dapo.report.watchdog import waiting
from dapo.sampling.lending import Slots
from dapo.types import Int32Array, Prompt, Response, Sampling, TrainSequence
from workers.capacity import FleetCapacity
from workers.engines.canary import CANARY, canary_sequence
from workers.engines.group import Prefix, RunningGroup, cut_off, give_up
from workers.engines.keeper import Keeper
from workers.engines.slot import EngineSlot, Gpus
from workers.engines.unfinished import Unfinished
from workers.engines.updates import WeightUpdates
from workers.remote import RemoteError, WorkerLost, wait_for_stream


class RolloutPool(WeightUpdates):
    """Holds the engines. A group goes to the one with the fewest running responses, the turns of its responses too."""

    def __init__(
        self,
        options: list[dict[str, Any]],
        cfg: RolloutConfig,
        *,
        warn: Callable[[str], None] = lambda line: None,
        release: Callable[[int], None] = lambda number: None,
        lent: int = 0,
    ) -> None:
        """Makes the engines' actors. options: Ray options of each engine, from `workers.placement`. release: told which
        engine is given up. lent: how many of them, the last ones, are lent the actors' GPUs now and then."""
        self._cfg = cfg
        self.keeper = Keeper(options, cfg, warn, release, lent)
        self._slots, self.tokens_per_s = self.keeper.slots, self.keeper.tokens_per_s
        self._on_gpus = any("num_gpus" in each for each in options)
        self._groups: dict[str, RunningGroup] = {}
        self._prompt = np.arange(1, 9, dtype=np.int32)  # the last one
        self._fleet = FleetCapacity([])
        self._processes, self._refused = 1, ""  # of one engine; why the engines may serve nothing now

    async def start(self, model_path: str, engine_args: dict[str, Any], gpus: Gpus = lambda number: ()) -> None:
        """Starts all engines, and watches over them from then on. gpus: of an engine, where they are ranks' too."""
        await self.keeper.start(model_path, engine_args, gpus)
        self._fleet = FleetCapacity([slot.size for slot in self._slots if slot.size is not None])
        self._processes = gpus_per_engine(engine_args)

    def lap(self) -> dict[str, float]:
        """Returns what the engines did since the last lap, as metrics; see `Keeper.lap`."""
        return self.keeper.lap(self._processes if self._on_gpus else 0)

    @property
    def workers(self) -> list[Any]:
        """Lists the engines' actors as they are now."""
        return [slot.worker for slot in self._slots]

    @property
    def capacity(self) -> int:
        """Counts the responses that all engines together run at once; those that start again included, and not those
        that sleep on GPUs that they are lent."""
        return self._slots_of(sum(self.has_turn(slot.number) for slot in self._slots) if self.keeper.lends else None)

    def _slots_of(self, engines: int | None) -> int:
        """Counts the responses that so many engines run at once, None: all."""
        there = self._fleet.responses
        return there if engines is None else there * engines // len(self._slots)

    def slots(self) -> Slots:
        """Returns what the engines with GPUs of their own can run, what those that are lent some could, and what waits
        for either."""
        lent = sum(slot.lent for slot in self._slots)
        load, there = sum(slot.load for slot in self._slots), self.capacity
        return Slots(
            own=self._slots_of(len(self._slots) - lent),
            lent=self._slots_of(lent),
            queued=max(0, load - there),
            response_s=self._fleet.response_s * there / max(there, load, 1),  # without the time in an engine's queue
        )

    def room(self, n: int) -> int:
        """Counts the groups of n responses that may start now, so that all engines are full and each has a group
        waiting; those in the background do not count, and end before the engine takes what waits in their slots."""
        if not self.awake:
            return 0
        there = sum(slot.serving for slot in self._slots) or 1  # where none serves, one is about to
        load = sum(len(group.left) for group in self._groups.values() if not group.background)
        return max(0, (self._slots_of(there) + there * n - load) // n)

    @property
    def spare(self) -> int:
        """Counts the responses that may start in the background, in slots that nothing takes now."""
        there = sum(slot.serving for slot in self._slots)
        load = sum(len(group.left) for group in self._groups.values())
        return max(0, self._slots_of(there) - load)

    @property
    def serving(self) -> bool:
        """Returns whether an engine serves now."""
        return any(slot.serving for slot in self._slots)

    async def generate(
        self,
        key: str,
        prompt: Int32Array,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        background: bool = False,
        problem: Prompt | None = None,
        prefix: Prefix | None = None,
    ) -> AsyncGenerator[tuple[int, Response]]:
        """Yields the responses to one prompt as they end, each with its number; `key` names the group for `abort`.

        What an engine that is lost had not ended, another one generates again; what was put down goes on from there.
        prefix: of requests that begin alike; they go to one engine for as long as it serves.
        """
        left = {number: Unfinished(seed=seed) for number, seed in enumerate(seeds)}
        group = self._groups[key] = RunningGroup(left=left, background=background, prefix=prefix or Prefix())
        self._prompt = prompt
        try:
            while left and (slot := await self._slot(group)) is not None:
                group.runs_on(slot)
                try:
                    async with aclosing(self._from(slot, key, prompt, sampling, left)) as parts:
                        async for number, part in parts:
                            if (response := group.take(number, part)) is not None:
                                self._fleet.observe(len(prompt), len(response.token_ids), response.seconds)
                                yield number, response
                except WorkerLost:
                    slot.serving = False  # its watch will find out
                group.home = None
            for number, response in group.rest():
                yield number, response
        finally:
            del self._groups[key]
            if group.home is not None:  # given up before its end, which nobody will ask its engine for
                give_up(key, *group.home, self._cfg.timeout_s)

    async def _slot(self, group: RunningGroup) -> EngineSlot | None:
        """Returns the engine that has the prefix, else the one with the fewest responses, as soon as one serves; None
        when the group is not wanted.

        What runs in the background stays off engines that will sleep before it has ended, where others serve.
        """
        prefers = lambda slot: (slot.lent and group.background, slot.number != group.prefix.engine, slot.load)  # noqa: E731
        while not group.aborted:
            if reason := self.keeper.exhausted or self._refused:
                raise RemoteError(reason)
            if serving := [slot for slot in self._slots if slot.serving]:
                return min(serving, key=prefers)
            if not self.awake:  # for as long as the driver wants
                await self.keeper.changed.wait()
                continue
            try:
                with waiting("an engine that serves", each="groups"):
                    await asyncio.wait_for(self.keeper.changed.wait(), self._cfg.timeout_s)
            except TimeoutError:
                raise RemoteError(
                    f"waited {self._cfg.timeout_s:g} s for an engine that serves; raise `rollout.timeout_s` if this is "
                    "expected"
                ) from None
        return None

    async def _from(
        self, home: EngineSlot, key: str, prompt: Int32Array, sampling: Sampling, left: dict[int, Unfinished]
    ) -> AsyncGenerator[tuple[int, Response]]:
        """Yields the next parts of the responses with these numbers, from one engine."""
        numbers, starts = list(left), [unfinished.start() for unfinished in left.values()]
        running = len(numbers)
        home.load += running
        try:
            stream = home.worker.generate.options(num_returns="streaming")
            parts = stream.remote(key, prompt, replace(sampling, n=running), starts)
            what = f"group {key} from engine {home.number}"
            with waiting(home.member(), home.doing, silent=home.silent):
                async for part in wait_for_stream(parts, self._cfg.timeout_s, what, "rollout.timeout_s"):
                    running -= len(part)
                    home.load -= len(part)
                    for place, response in part:
                        yield numbers[place], replace(response, engine=home.number)
        finally:
            home.load -= running

    async def abort(self, keys: list[str]) -> None:
        """Ends the named groups wherever they run; returns when none of them does."""
        for key in keys:
            if group := self._groups.get(key):
                group.aborted = True
        self.keeper.notify()
        await cut_off(self._groups, lambda: self._groups.keys() & set(keys), self._cfg.timeout_s)

    async def put_down(self) -> None:
        """Takes all responses off the engines that share GPUs; returns when none runs any. What they had is kept on the
        driver. None of them serves until `admit`, and each group goes on where it was, on whichever engine serves: its
        responses have tokens of more than one version where the weights have changed meanwhile.
        """
        self.keeper.turn.clear()
        resting = {slot for slot in self._slots if self.keeper.takes_turns(slot)}
        for slot in resting:
            slot.serving = False
        there = lambda group: group.home is not None and group.home[0] in resting  # noqa: E731
        for group in filter(there, self._groups.values()):
            group.put_down = True
        await cut_off(
            self._groups, lambda: {key for key, each in self._groups.items() if there(each)}, self._cfg.timeout_s
        )

    @property
    def awake(self) -> bool:
        """Returns whether some engines, and not the actors, have the GPUs that they serve on."""
        return self.keeper.lends or self.keeper.turn.is_set()

    def has_turn(self, number: int) -> bool:
        """Returns whether the GPUs of this engine are its own or, where it shares them, not the actors' now."""
        return self.keeper.turn.is_set() or not self.keeper.takes_turns(self._slots[number])

    def serves(self, number: int) -> bool:
        """Returns whether groups go to this engine."""
        return self._slots[number].serving

    def is_lent(self, number: int) -> bool:
        """Returns whether this engine has GPUs only while the actors lend it theirs."""
        return self._slots[number].lent

    def lend(self) -> None:
        """Lets engines that were lost on GPUs which the actors lend start again, until these take them back."""
        self.keeper.turn.set()

    async def sleep(self) -> None:
        """Lets the engines that share GPUs sleep until a weight sync wakes them; they put down what they run."""
        await self.put_down()
        await self.keeper.sleep()

    async def sleep_lighter(self, why: str) -> bool:
        """Lets them sleep again, less deep; see `Keeper.sleep_lighter`."""
        return await self.keeper.sleep_lighter(why)

    def members(self, *, lent: bool = False) -> tuple[int, ...]:
        """Returns the engines that run, and can take part in a weight sync: see `Keeper.members`."""
        return self.keeper.members(lent=lent)

    async def lose_silent(self, members: Sequence[int], grace_s: float) -> bool:
        """Replaces those of these engines that answer nothing; see `Keeper.lose_silent`."""
        return await self.keeper.lose_silent(members, grace_s)

    async def canaries(self, members: Sequence[int]) -> list[TrainSequence]:
        """Returns a few tokens from each of these engines that has started again and not served since; others at each
        call."""
        new = [slot for number in members if not (slot := self._slots[number]).proven]
        return list(await asyncio.gather(*[self._canary(slot) for slot in new]))

    async def _canary(self, slot: EngineSlot) -> TrainSequence:
        slot.compared += 1  # other tokens each time
        name, unfinished = f"canary-{slot.number}-{slot.compared}", Unfinished(seed=slot.compared)
        sampling = replace(CANARY, temperature=self._cfg.temperature)  # the actors compute at this one
        responses = self._from(slot, name, self._prompt, sampling, {0: unfinished})
        [response] = [response async for _, response in responses]
        return canary_sequence(self._prompt, response)

    def admit(self, members: Sequence[int]) -> None:
        """Lets groups go to these engines: they hold the weights that all serve."""
        self._refused = ""
        self.keeper.served(members)
        for number in members:
            slot = self._slots[number]
            slot.serving = slot.proven = slot.started
        self.keeper.notify()

    def drop(self, members: Sequence[int]) -> None:
        """Gives these engines up; others take their places when they may."""
        for number in members:
            self._slots[number].drop()

    def refuse(self, reason: str) -> None:
        """Generates nothing until the next sync: an engine may hold a mixture of two versions, and stays paused."""
        self._refused = reason
        self.keeper.notify()

    async def stop(self, grace_s: float) -> None:
        """Lets the engines end their processes for `grace_s`, then kills what is left."""
        await self.keeper.stop(grace_s)
