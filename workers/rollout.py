"""Driver-side pool of all vLLM engines: assigns groups to engines, replaces lost engines, and forwards weights. Another
engine repeats the responses of a lost one from the same seeds, with the same result."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from dapo.config.derived import gpus_per_engine
from dapo.config.sampling import RolloutConfig
from dapo.ground.watchdog import waiting
from dapo.sampling.lending import Slots
from dapo.types import Int32Array, Request, Response, Sampling, TrainSequence
from dapo.workers.capacity import EngineSize, FleetCapacity
from dapo.workers.engines.keeper import Keeper
from dapo.workers.engines.requests import Prefix, RunningGroup, Unfinished, abort_all, abort_in_background
from dapo.workers.engines.slot import EngineSlot, Gpus
from dapo.workers.engines.stream import secrets_of
from dapo.workers.remote import RemoteError, WorkerLost, wait, wait_for_all, wait_for_stream
from dapo.workers.weights.bucket import Bucket

LOOK_S, STOP_S = 0.1, 3.0
CANARY = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=16)


def canary_sequence(prompt: Int32Array, response: Response) -> TrainSequence:
    return TrainSequence(
        token_ids=np.concatenate([prompt, response.token_ids]),
        num_prompt_tokens=len(prompt),
        rollout_logprobs=response.rollout_logprobs,
        advantage=0.0,
        token_weight=0.0,
        staleness=np.zeros(len(response.token_ids), dtype=np.int32),
        support=response.support,
        prompt_experts=None if response.experts is None else response.experts[: len(prompt) - 1],
        experts=None if response.experts is None else response.experts[len(prompt) - 1 :],
    )


class RolloutPool:
    """All engines. A group goes to the engine with the fewest running responses, and so does each turn of a multi-turn
    response."""

    def __init__(
        self,
        options: list[dict[str, Any]],
        cfg: RolloutConfig,
        *,
        warn: Callable[[str], None] = lambda line: None,
        release: Callable[[int], None] = lambda number: None,
        lent: int = 0,
        outside: dict[str, Any] | None = None,
        lags: int = 0,
    ) -> None:
        """options: Ray options of each engine, from `workers.placement`. release: called with the number of an engine
        that is dropped for good. lent: number of engines, the last ones, that run on GPUs lent by the actors. outside:
        Ray options of actors that speak for engines outside of the cluster; None: none may come. lags: how many
        versions these may lag behind."""
        self._cfg = cfg
        self.keeper = Keeper(options, cfg, warn, release, self._rejoin, lent)
        self._slots, self.tokens_per_s = self.keeper.slots, self.keeper.tokens_per_s
        self._on_gpus = any("num_gpus" in each for each in options)
        self._groups: dict[str, RunningGroup] = {}
        self._left = Counter[bool]()  # responses that have not ended, of groups in the background and of others
        self._prompt = np.arange(1, 9, dtype=np.int32)  # the last prompt, for canaries
        self._fleet = FleetCapacity([])
        self._processes, self._refused = 1, ""  # processes of one engine; why no engine may serve now
        self._give_weights: Callable[[int], Awaitable[None]] | None = None
        self._give_versions: Callable[[int], Awaitable[None]] | None = None
        self._outside, self._lags = outside, lags
        if outside is not None:
            secrets_of(cfg.outside)  # tried before anything starts
        self._version = 0  # that the engines of the cluster serve

    async def start(self, model_path: str, engine_args: dict[str, Any], gpus: Gpus = lambda number: ()) -> None:
        """Starts and supervises all engines. gpus: the GPUs of an engine, if it shares them with ranks."""
        await self.keeper.start(model_path, engine_args, gpus)
        if self._outside is not None:
            self.keeper.listen(self._outside, self._empty, self._supply)
        self._fleet = FleetCapacity(self._sizes())
        self._processes = gpus_per_engine(engine_args)

    def _sizes(self) -> list[EngineSize]:
        return [slot.size for slot in self._slots if slot.size is not None and not slot.leaving]

    @property
    def engines(self) -> dict[int, str]:
        """Numbers and nodes (Ray's ids; "" at first) of the cluster's engines with their own GPUs, whether or not they
        serve; without those that leave."""
        return {slot.number: slot.node for slot in self._slots if not (slot.leaving or slot.lent or slot.outside)}

    @property
    def may_join(self) -> bool:
        """False after too many engines, within an hour or in a row, could not join."""
        return not self.keeper.joins.spent()

    def join(self, options: dict[str, Any]) -> int:
        """Starts one engine more, and returns its number. options: of Ray, from `workers.placement`."""
        return self.keeper.join(options)

    async def leave(self, number: int, notice_s: float, *, hand_over: bool) -> None:
        """Ends an engine: it takes no more groups, and has `notice_s` to finish those that run. Then others continue
        what is unfinished. hand_over: also where that changes later tokens (`EngineSize.goes_on`); otherwise they
        repeat it from its seeds, with the same result."""
        slot = self._slots[number]
        self.keeper.retire(slot)
        self._fleet.engines = tuple(self._sizes())
        await self._end_groups(slot, notice_s, hand_over=hand_over)
        await self.keeper.end(slot, STOP_S)

    async def _end_groups(self, slot: EngineSlot, notice_s: float, *, hand_over: bool) -> None:
        until = time.monotonic() + notice_s
        while slot.load and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        if slot.load and (hand_over or (slot.size is not None and slot.size.goes_on)):
            await self._put_down({slot})

    async def _empty(self, slot: EngineSlot) -> None:
        """Takes the groups off an engine outside of the cluster. With `lags`, others continue them at once."""
        slot.serving = False
        await self._end_groups(slot, 0.0 if self._lags else self._cfg.leave_s, hand_over=self._lags > 0)

    def take_weights(
        self, rejoin: Callable[[int], Awaitable[None]], supply: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        """rejoin: gives one restarted engine its weights. Without this call, it serves the model that it loads. supply:
        gives an engine outside of the cluster each version in turn, until it is cancelled."""
        self._give_weights, self._give_versions = rejoin, supply

    async def _supply(self, number: int) -> None:
        assert self._give_versions is not None
        await self._give_versions(number)

    async def _rejoin(self, number: int) -> None:
        if self._give_weights is None:
            self.admit((number,))
        else:
            await self._give_weights(number)

    def lap(self) -> dict[str, float]:
        return self.keeper.lap(self._processes / self._cfg.engines_per_gpu if self._on_gpus else 0)

    @property
    def workers(self) -> list[Any]:
        return [slot.worker for slot in self._slots]

    @property
    def capacity(self) -> int:
        """Number of responses that all engines together run at once, including engines that restart, but not those that
        sleep on lent GPUs."""
        with_turn = sum(self.has_turn(slot.number) and not slot.leaving for slot in self._slots)
        return self._slots_of(with_turn if self.keeper.lends else None)

    def _slots_of(self, engines: int | None) -> int:
        """Number of responses that this many engines run at once. engines: None means all."""
        there = self._fleet.responses
        return there if engines is None else there * engines // max(1, len(self._fleet.engines))

    def slots(self) -> Slots:
        """Returns the slots of engines with their own GPUs, those of lent engines, and the responses queued for
        either."""
        lent = sum(slot.lent for slot in self._slots)
        load, there = sum(slot.load for slot in self._slots), self.capacity
        return Slots(
            own=self._slots_of(len(self.engines)),
            lent=self._slots_of(lent),
            queued=max(0, load - there),
            response_s=self._fleet.response_s * there / max(there, load, 1),  # without queueing time
        )

    def room(self, n: int) -> int:
        """Number of groups of n responses that may start now so that all engines are full with one group each waiting.
        Background groups do not count: they end before the engine takes what waits for their slots."""
        if not self.awake:
            return 0
        room = lambda engines: (self._slots_of(engines) + engines * n - self._left[False]) // n  # noqa: E731
        if room(len(self._slots)) <= 0:  # the most frequent case
            return 0
        return max(0, room(sum(slot.serving for slot in self._slots) or 1))  # if none serves, one is about to

    @property
    def spare(self) -> int:
        """Number of background responses that may start, in slots that are free now."""
        there = sum(slot.serving for slot in self._slots)
        return max(0, self._slots_of(there) - self._left.total())

    @property
    def serving(self) -> bool:
        return any(slot.serving for slot in self._slots)

    async def generate(self, request: Request, prefix: Prefix | None = None) -> AsyncGenerator[tuple[int, Response]]:
        """Yields the responses as they end, each with its number. prefix: shared by requests that begin alike; they go
        to one engine as long as it serves. Another engine repeats the unfinished responses of a lost engine, and
        resumes those that were put down."""
        key, prompt = request.key, request.prompt
        left = {number: Unfinished(seed=seed) for number, seed in enumerate(request.seeds)}
        group = self._groups[key] = RunningGroup(left=left, background=request.background, prefix=prefix or Prefix())
        self._prompt = prompt
        self._left[group.background] += len(left)
        try:
            while left and (slot := await self._slot(group)) is not None:
                group.runs_on(slot)
                try:
                    async with aclosing(self._from(slot, key, prompt, request.sampling, left)) as parts:
                        async for number, part in parts:
                            if (response := group.take(number, part)) is not None:
                                self._left[group.background] -= 1
                                self._fleet.observe(len(prompt), len(response.token_ids), response.seconds)
                                yield number, response
                except WorkerLost:
                    slot.serving = False  # its watch task handles the loss
                group.home = None
            self._left[group.background] -= len(left)
            for number, response in group.rest():
                yield number, response
        finally:
            del self._groups[key]
            self._left[group.background] -= len(left)
            if group.home is not None:  # the caller stopped early
                abort_in_background(key, *group.home, self._cfg.timeout_s)

    async def _slot(self, group: RunningGroup) -> EngineSlot | None:
        """Waits for a serving engine; None if the group is aborted. Background groups avoid lent engines, which may
        sleep before they end. Otherwise prefers the engine that has the prefix, then the least loaded one."""
        home = group.prefix.engine
        prefers = lambda slot: (slot.lent, slot.number != home, slot.load)  # noqa: E731
        while not group.aborted:
            if reason := self.keeper.exhausted or self._refused:
                raise RemoteError(reason)
            if home >= 0 and self._slots[home].serving and not group.background:
                return self._slots[home]
            if serving := [slot for slot in self._slots if slot.serving]:
                if not group.background:
                    return min(serving, key=attrgetter("load"))
                # An evaluation is of one version, which an engine outside of the cluster may not have yet.
                if current := [slot for slot in serving if not slot.outside or slot.version == self._version]:
                    return min(current, key=prefers)
            if not self.awake:  # without a deadline: the driver decides
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
        """Yields the next parts of these responses, with their numbers, from one engine."""
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
        """Aborts the named groups; returns when none of them runs."""
        for key in keys:
            if group := self._groups.get(key):
                group.aborted = True
        self.keeper.notify()
        await abort_all(self._groups, lambda: self._groups.keys() & set(keys), self._cfg.timeout_s)

    async def put_down(self) -> None:
        """Aborts all responses on engines that share GPUs, and keeps their tokens on the driver; returns when none
        runs. These engines do not serve until `admit`. The groups resume on any serving engine, so that a response may
        have tokens of several versions."""
        self.keeper.turn.clear()
        await self._put_down({slot for slot in self._slots if self.keeper.takes_turns(slot)})

    async def _put_down(self, resting: set[EngineSlot]) -> None:
        for slot in resting:
            slot.serving = False
        there = lambda group: group.home is not None and group.home[0] in resting  # noqa: E731
        for group in filter(there, self._groups.values()):
            group.put_down = True
        await abort_all(
            self._groups, lambda: {key for key, each in self._groups.items() if there(each)}, self._cfg.timeout_s
        )

    @property
    def awake(self) -> bool:
        """Whether some engines, not the actors, have the GPUs that they serve on."""
        return self.keeper.lends or self.keeper.turn.is_set()

    def has_turn(self, number: int) -> bool:
        """Whether this engine has its own GPUs, or the actors do not use the shared ones now."""
        return self.keeper.turn.is_set() or not self.keeper.takes_turns(self._slots[number])

    def serves(self, number: int) -> bool:
        return self._slots[number].serving

    def is_lent(self, number: int) -> bool:
        """Whether this engine has GPUs only while the actors lend theirs."""
        return self._slots[number].lent

    def lend(self) -> None:
        """Lets lost engines on lent GPUs restart, until the actors take the GPUs back."""
        self.keeper.turn.set()

    async def sleep(self) -> None:
        """Puts down all responses of the engines that share GPUs, which then sleep until a weight sync wakes them."""
        await self.put_down()
        await self.keeper.sleep()

    async def sleep_lighter(self, why: str) -> bool:
        return await self.keeper.sleep_lighter(why)

    def members(self, *, lent: bool = False) -> tuple[int, ...]:
        return self.keeper.members(lent=lent)

    async def lose_silent(self, members: Sequence[int], grace_s: float) -> bool:
        return await self.keeper.lose_silent(members, grace_s)

    async def canaries(self, members: Sequence[int]) -> list[TrainSequence]:
        """Returns a few tokens from each of these engines that is not proven yet; different tokens at each call."""
        new = [slot for number in members if not (slot := self._slots[number]).proven]
        return list(await asyncio.gather(*[self._canary(slot) for slot in new]))

    async def _canary(self, slot: EngineSlot) -> TrainSequence:
        slot.compared += 1  # other tokens each time
        name, unfinished = f"canary-{slot.number}-{slot.compared}", Unfinished(seed=slot.compared)
        # The actors use this temperature, and these experts.
        sampling = replace(CANARY, temperature=self._cfg.temperature, experts=self._cfg.replay_experts)
        responses = self._from(slot, name, self._prompt, sampling, {0: unfinished})
        [response] = [response async for _, response in responses]
        return canary_sequence(self._prompt, response)

    async def probe(self, prompts: Sequence[Int32Array], sampling: Sampling, seed: int) -> list[TrainSequence]:
        """Returns one response of one engine to each prompt, outside of the counts of what engines do; none if no
        engine serves."""
        serving = [slot for slot in self._slots if slot.serving and not slot.outside]
        if not serving:
            return []

        async def one(number: int, prompt: Int32Array) -> TrainSequence:
            unfinished = Unfinished(seed=seed + number)
            parts = self._from(serving[0], f"probe-{seed}-{number}", prompt, sampling, {0: unfinished})
            [response] = [response async for _, response in parts]
            return canary_sequence(prompt, response)

        return list(await asyncio.gather(*map(one, range(len(prompts)), prompts)))

    def admit(self, members: Sequence[int]) -> None:
        """Lets groups go to these engines, which hold the current weights."""
        if not any(self._slots[number].outside for number in members):
            self._refused = ""
        self.keeper.served(members)
        for number in members:
            slot = self._slots[number]
            slot.proven = slot.started
            slot.serving = slot.started and not slot.leaving
        self._fleet.engines = max(self._fleet.engines, tuple(self._sizes()), key=len)
        self.keeper.notify()

    def drop(self, members: Sequence[int]) -> None:
        """Kills these engines; their watch tasks replace them."""
        for number in members:
            self._slots[number].drop()

    def refuse(self, reason: str) -> None:
        """Stops generation until the next sync: an engine may hold a mixture of two versions, and stays paused."""
        self._refused = reason
        self.keeper.notify()

    # The engines' half of a weight sync: each method returns when all members (engine numbers) have finished, or raises
    # RemoteError.

    def identities(self, members: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Returns (number, life) of these engines: a new process must connect again."""
        return tuple((number, self._slots[number].life) for number in members)

    def num_receivers(self, members: Sequence[int]) -> int:
        """Returns the number of processes of these engines, each of which holds a part of the weights."""
        return len(members) * self._processes

    async def leave_weights(self, members: Sequence[int], timeout_s: float) -> None:
        calls = [self._slots[k].worker.leave_weights.remote() for k in members]
        await self._all(calls, members, timeout_s, "to leave the weight sync")

    async def connect_weights(self, info: dict[str, Any], members: Sequence[int], timeout_s: float) -> None:
        """Opens these engines' ends, while the actors open theirs. info: fields of `BucketInitInfo`, without
        first_rank, and in `memory` the handles for each of the engines on a GPU."""
        ranks = range(1, 1 + self.num_receivers(members), self._processes)
        infos = []
        for number, first in zip(members, ranks, strict=True):
            own = {place: handles[number % self._cfg.engines_per_gpu] for place, handles in info["memory"].items()}
            infos.append(info | {"first_rank": first, "memory": own})
        calls = [self._slots[k].worker.connect_weights.remote(each) for k, each in zip(members, infos, strict=True)]
        await self._all(calls, members, timeout_s, "to open the weight sync")

    async def start_update(self, version: int, keep: bool, members: Sequence[int], timeout_s: float) -> None:
        """Pauses all requests of these engines until `finish_update`. keep: their KV cache stays, except where
        `version` was served before, perhaps with other weights."""
        slots = [self._slots[k] for k in members]
        calls = [slot.worker.start_update.remote(keep and version > slot.version) for slot in slots]
        await self._all(calls, members, timeout_s, "to pause")

    async def load_bucket(self, bucket: Bucket, what: str, members: Sequence[int], timeout_s: float) -> None:
        calls = [self._slots[k].worker.load_bucket.remote(bucket) for k in members]
        await self._all(calls, members, timeout_s, f"to load {what}")

    async def finish_update(self, version: int, members: Sequence[int], timeout_s: float) -> None:
        """Resumes these engines with `version`, unless a parameter is missing."""
        calls = [self._slots[k].worker.finish_update.remote(version) for k in members]
        await self._all(calls, members, timeout_s, f"to serve version {version}")
        self._version = version
        for number in members:
            self._slots[number].version = version

    # Engines outside of the cluster take weights one by one, from the store.

    def version(self, number: int) -> int:
        return self._slots[number].version

    def is_proven(self, number: int) -> bool:
        return self._slots[number].proven

    def outdate(self, oldest: float) -> None:
        """Gives no groups to engines outside of the cluster that have an older version than `oldest`."""
        for slot in self._slots:
            if slot.outside and slot.version < oldest:
                slot.serving, slot.version = False, -1

    async def fetch(self, number: int, bucket: Bucket, what: str, timeout_s: float) -> None:
        """Has an engine outside of the cluster fetch a bucket, while it serves."""
        await self._all([self._slots[number].worker.fetch.remote(bucket)], (number,), timeout_s, f"to fetch {what}")

    async def load(self, number: int, version: int, keep: bool, buckets: list[Bucket], timeout_s: float) -> None:
        slot = self._slots[number]
        load = slot.worker.load.remote(version, keep and version > slot.version >= 0, buckets)
        await self._all([load], (number,), timeout_s, f"to load version {version}")
        slot.version = version

    async def _all(self, refs: Sequence[Any], members: Sequence[int], timeout_s: float, what: str) -> None:
        key = "weight_sync.timeout_s"
        engines = zip(members, refs, strict=True)
        await wait_for_all(wait([ref], timeout_s, self._slots[k].member(what), key) for k, ref in engines)

    async def stop(self, grace_s: float) -> None:
        await self.keeper.stop(grace_s)
