"""Engines that sleep while actors train, and that start again, on stand-ins: who sleeps, waits, or is dropped."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dapo.config.sampling import RolloutConfig
from dapo.types import Sampling
from dapo.workers.capacity import EngineSize
from dapo.workers.engines import keeper as keeping
from dapo.workers.engines import slot as slots
from dapo.workers.engines.keeper import DEEPEST, LIGHTEST
from dapo.workers.remote import RemoteError
from dapo.workers.rollout import RolloutPool
from tests.support.fakes import make_response


class Slot:
    """An engine's place; `ends` ends the engine that is there."""

    def __init__(self, number, options, cfg, *, count, lent):
        self.number, self.size, self.serving, self.proven, self.rested = number, None, False, True, False
        self.worker = object()
        self.lent, self.leaving, self.outside = lent, False, False
        self.restarts, self.slept, self.dropped = 0, [], 0
        self.ends, self.let_start = asyncio.Event(), asyncio.Event()
        self.let_start.set()
        self.refuses, self.known = "", False
        self.limit = SimpleNamespace(spent=lambda: self.restarts >= 5, add=lambda: None, worked=lambda: None, most=5)
        self.failures, self.like = [], None

    started = property(lambda self: self.size is not None)

    async def start(self, *arguments):
        await self.let_start.wait()
        if self.failures:
            raise RemoteError(self.failures.pop(0))
        self.size = 1

    def as_large_as(self, other):
        assert other.started
        self.like = other.number

    async def restart(self, *arguments):
        self.restarts, self.known, self.rested, self.worker = self.restarts + 1, False, False, object()
        await self.start()

    async def until_lost(self):
        await self.ends.wait()
        self.ends.clear()
        self.known = True
        return "it ended"

    def drop(self):
        self.serving, self.size = False, None
        self.dropped += 1
        if not self.known:  # its watch finds out
            self.ends.set()

    async def sleep(self, level):
        if self.refuses:
            raise RemoteError(self.refuses)
        self.slept.append(level)

    async def answers(self, grace_s):
        """No; and meanwhile its watch may have put another one in its place."""
        self.ends.set()
        await settled()
        return False

    async def stop(self, grace_s):
        pass


def on_two_engines(lent: int = 0):
    """Runs a test on a keeper of two slots; `said` is what it warned of."""

    def decorated(test):
        def run(monkeypatch):
            monkeypatch.setattr(keeping, "EngineSlot", Slot)
            asyncio.run(kept(test, lent))

        return run

    return decorated


async def kept(test, lent=0):
    async def rejoin(number):
        pass

    said = []
    cfg = RolloutConfig(num_engines=2 - lent)
    keeper = keeping.Keeper([{}, {}], cfg, said.append, lambda number: None, rejoin, lent)
    await keeper.start("model", {}, lambda number: ())
    try:
        await asyncio.wait_for(test(keeper, said), 10)
    finally:
        await keeper.stop(0.0)


@pytest.mark.parametrize(
    ("failures", "restarts"),
    [("ab", 2), ("abcde", 5), ("abcdef", None), ("aa", None)],
    ids=["mended", "mended at the last", "too often", "the same again"],
)
def test_an_engine_that_does_not_start_at_first_is_started_again(failures, restarts, monkeypatch):
    """As one is whose port was taken, or whose GPU a former job still frees; not one with a wrong argument."""
    monkeypatch.setattr(keeping, "EngineSlot", Slot)
    monkeypatch.setattr(keeping, "PAUSE_S", 0.0)
    said = []

    async def whole():
        keeper = keeping.Keeper(
            [{}, {}], RolloutConfig(num_engines=2), said.append, lambda number: None, lambda number: None
        )
        keeper.slots[1].failures = [*failures]
        try:
            await keeper.start("model", {}, lambda number: ())
            return keeper.slots[1].restarts, [slot.serving for slot in keeper.slots]
        finally:
            await keeper.stop(0.0)

    if restarts is None:
        with pytest.raises(RemoteError, match=failures[-1]):
            asyncio.run(whole())
    else:
        assert asyncio.run(whole()) == (restarts, [True, True])
    told = failures[:-1] if restarts is None else failures
    assert said == [f"engine 1 did not start, and is started again: {why}" for why in told]


@pytest.mark.parametrize(
    ("options", "alone", "like"),
    [({"num_gpus": 0}, [0, 2], [None, 0, None, 2]), ({}, [0, 1, 2, 3], [None] * 4)],
    ids=["on GPUs of ranks", "on a CPU"],
)
def test_of_engines_on_one_gpu_the_first_starts_alone_and_the_others_take_its_cache_size(
    options, alone, like, monkeypatch
):
    """vLLM measures by what is free on the GPU, which an engine that starts beside it would change."""
    monkeypatch.setattr(keeping, "EngineSlot", Slot)

    async def whole():
        cfg = RolloutConfig(num_engines=4, engines_per_gpu=2)
        keeper = keeping.Keeper([options] * 4, cfg, lambda line: None, lambda number: None, lambda number: None)
        keeper.slots[0].let_start.clear()
        starting = asyncio.create_task(keeper.start("model", {}, lambda number: ()))
        await settled()
        assert [slot.number for slot in keeper.slots if slot.started] == [number for number in alone if number]
        keeper.slots[0].let_start.set()
        await starting
        assert [slot.like for slot in keeper.slots] == like and all(slot.serving for slot in keeper.slots)
        await keeper.stop(0.0)

    asyncio.run(whole())


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


@on_two_engines()
async def test_all_sleep_and_none_serves_until_the_next_sync(keeper, said):
    await keeper.sleep()
    assert [slot.slept for slot in keeper.slots] == [[DEEPEST]] * 2
    assert not any(slot.serving for slot in keeper.slots) and not keeper.turn.is_set()
    assert not any(slot.proven for slot in keeper.slots), "they are compared before they serve"
    for slot in keeper.slots:
        slot.proven = True
    keeper.served((0, 1))
    assert keeper.turn.is_set()
    await keeper.sleep()
    assert all(slot.proven for slot in keeper.slots), "once is enough"


@on_two_engines()
async def test_an_engine_lost_while_it_sleeps_starts_when_the_actors_have_trained(keeper, said):
    await keeper.sleep()
    lost = keeper.slots[1]
    lost.ends.set()
    await settled()
    assert lost.dropped == 1 and lost.restarts == 0 and keeper.members() == (0,)
    keeper.served((0,))
    await settled()
    assert lost.restarts == 1 and keeper.members() == (0, 1)


@on_two_engines()
async def test_an_engine_that_starts_when_the_others_are_to_sleep_is_waited_for(keeper, said):
    late = keeper.slots[0]
    late.let_start.clear()
    late.ends.set()
    await settled()
    assert late.restarts == 1 and not late.started
    sleeping = asyncio.create_task(keeper.sleep())
    await settled()
    assert not sleeping.done(), "it would take the memory that the actors need"
    late.let_start.set()
    await sleeping
    assert late.slept == [DEEPEST]


@on_two_engines()
async def test_an_engine_that_does_not_sleep_is_dropped(keeper, said):
    keeper.slots[0].refuses = "two groups run"
    await keeper.sleep()
    assert keeper.slots[0].dropped and not keeper.slots[1].dropped and keeper.members() == (1,)
    assert any("engine 0 does not sleep, and is dropped: two groups run" in line for line in said)


@on_two_engines()
async def test_engines_sleep_less_deep_once_and_only_before_they_have_proven_themselves(keeper, said):
    assert not await keeper.sleep_lighter("early"), "they have not slept"
    await keeper.sleep()
    assert await keeper.sleep_lighter("other log-probabilities")
    assert keeper.slots[0].slept == [DEEPEST, LIGHTEST] and "level 1): other log-probabilities" in said[-1]
    assert not await keeper.sleep_lighter("again")
    keeper.served(())
    assert not keeper.level_proven, "no engine has served"
    keeper.slots[0].ends.set()
    await settled()
    keeper.served((0,))
    assert keeper.slots[0].restarts == 1 and not keeper.level_proven, "this one has not slept"
    keeper.served((1,))
    assert keeper.level_proven


@on_two_engines()
async def test_an_engine_that_cannot_join_twice_is_replaced(keeper, said):
    slot, asked = keeper.slots[0], []

    async def rejoin(number):
        asked.append(number)
        if len(asked) <= 2:
            raise RemoteError("another digest")
        slot.serving = True

    keeper._give_weights = rejoin
    slot.ends.set()
    await settled()
    assert (asked, slot.restarts) == ([0, 0, 0], 2) and slot.serving
    assert sum("could not join the weight sync: RemoteError: another digest" in line for line in said) == 2
    assert "engine 0 serves again (restart 2)" in said


@on_two_engines()
async def test_the_engine_that_took_the_place_of_a_silent_one_is_left_alone(keeper, said):
    assert await keeper.lose_silent((0,), 1.0)
    assert (keeper.slots[0].dropped, keeper.slots[0].restarts) == (1, 1) and keeper.members() == (0, 1)


@on_two_engines(lent=1)
async def test_of_engines_that_are_lent_gpus_the_others_neither_sleep_nor_wait(keeper, said):
    own, lent = keeper.slots
    await keeper.sleep()
    assert (own.slept, lent.slept) == ([], [DEEPEST]) and own.serving and not lent.serving
    assert own.proven and not lent.proven
    assert (keeper.members(), keeper.members(lent=True)) == ((0,), (1,))
    keeper.served((0,))
    assert not keeper.turn.is_set() and not keeper.level_proven, "the actors keep their GPUs in a sync of others"
    for slot in keeper.slots:
        slot.ends.set()
    await settled()
    assert (own.restarts, lent.restarts) == (1, 0), "only its own GPUs are free"
    keeper.turn.set()
    await settled()
    assert lent.restarts == 1
    keeper.served((1,))
    assert not keeper.level_proven, "this one has not slept"
    await keeper.sleep()
    keeper.served((1,))
    assert keeper.level_proven


@pytest.mark.parametrize(
    ("number", "lent", "least", "left"), [(0, 0, 2, "1"), (0, 0, 1, ""), (0, 1, 1, "0"), (1, 1, 1, "")]
)
def test_engines_lost_too_often_end_the_run_where_too_few_with_gpus_of_their_own_are_left(
    monkeypatch, number, lent, least, left
):
    async def test(keeper, said):
        keeper._cfg.min_engines = least
        keeper.slots[number].limit.spent = lambda: True
        keeper.slots[number].ends.set()
        await settled()
        assert "is given up" in said[-1] and keeper.slots[number].restarts == 0
        reason = f"{left} engines are left, and `rollout.min_engines` asks for {least}"
        assert keeper.exhausted.startswith(reason) if left else not keeper.exhausted

    monkeypatch.setattr(keeping, "EngineSlot", Slot)
    asyncio.run(kept(test, lent))


def test_an_engine_whose_gpus_are_not_to_be_had_is_one_that_does_not_start(monkeypatch):
    """Its watch tries again; a RuntimeError would end the watch, unnoticed."""

    def nowhere(number):
        raise RuntimeError("the Ray cluster had no 2 GPUs")

    monkeypatch.setattr(slots.EngineSlot, "_make", lambda self: None)
    slot = slots.EngineSlot(3, {}, RolloutConfig(), count=4)
    with pytest.raises(RemoteError, match="engine 3 has no GPUs to start on: the Ray cluster had no 2 GPUs"):
        asyncio.run(slot.start("model", {}, nowhere))


@pytest.mark.parametrize(
    ("options", "own", "again"),
    [
        pytest.param({"num_gpus": 0.0}, {}, 7, id="in turns"),
        pytest.param({"num_gpus": 0.5}, {}, 7, id="divided"),
        pytest.param({"num_gpus": 0.5}, {"kv_cache_memory_bytes": 5}, 5, id="as it is told"),
        pytest.param({"num_gpus": 1}, {}, None, id="a GPU of its own, perhaps of another size"),
        pytest.param({}, {}, None, id="no GPU"),
    ],
)
def test_an_engine_that_starts_again_beside_ranks_takes_the_cache_of_its_first_start(monkeypatch, options, own, again):
    """vLLM measures what is free, and ranks that free or take memory meanwhile mislead it or fail its assertion."""
    asked, sizes = [], iter([7, 0, 0, 0])  # vLLM measures nothing where it is told

    async def started(model, arguments, gpus):
        asked.append(arguments.get("kv_cache_memory_bytes"))
        return EngineSize(sequences=1, kv_tokens=0, window=1, cache_bytes=next(sizes))

    def make(slot):
        slot.worker = SimpleNamespace(start=SimpleNamespace(remote=started))

    monkeypatch.setattr(slots.EngineSlot, "_make", make)
    slot, other = (slots.EngineSlot(number, options, RolloutConfig()) for number in range(2))

    async def starts():
        for start in (slot.start, slot.restart, slot.restart):
            await start("model", own, lambda number: ())
        other.as_large_as(slot)
        await other.start("model", own, lambda number: ())

    asyncio.run(starts())
    assert asked == [own.get("kv_cache_memory_bytes"), again, again, again]


class Asked(RolloutPool):
    """A pool that notes what its engines are asked for, by name."""

    def __init__(self) -> None:
        self._cfg = RolloutConfig(temperature=0.6)
        self._prompt = np.arange(1, 9, dtype=np.int32)
        self.asked: dict[str, tuple[float, int]] = {}

    async def _from(self, slot: Any, name: str, prompt: Any, sampling: Sampling, left: Any) -> AsyncIterator[Any]:
        self.asked[name] = sampling.temperature, left[0].seed
        yield 0, make_response()


def test_a_canary_is_sampled_at_the_temperature_of_the_run_and_never_with_the_same_noise() -> None:
    """Tokens that rounding parts would part both sides at each attempt, and end the run."""
    pool, slot = Asked(), SimpleNamespace(number=0, restarts=1, compared=0)
    for slot.restarts in (1, 1, 1, 2):
        asyncio.run(pool._canary(slot))  # type: ignore[arg-type]
    assert [*pool.asked.values()] == [(0.6, 1), (0.6, 2), (0.6, 3), (0.6, 4)], "each has a name of its own"


def test_each_of_the_engines_on_a_gpu_opens_handles_of_its_own() -> None:
    """A handle of CUDA memory is for one other process."""
    opened: dict[int, Any] = {}

    class Worker:
        def __init__(self, number: int) -> None:
            self.connect_weights = SimpleNamespace(remote=lambda info: opened.update({number: info}))

    class Connected(RolloutPool):
        def __init__(self) -> None:
            self._cfg, self._processes = RolloutConfig(engines_per_gpu=2), 1
            self._slots = [SimpleNamespace(worker=Worker(number)) for number in range(4)]

        async def _all(self, *calls: Any) -> None: ...

    memory = {"one GPU": ["first", "second"], "another": ["third", "fourth"]}
    asyncio.run(Connected().connect_weights({"memory": memory}, (0, 2, 3), 1.0))
    mine = {number: (info["memory"]["one GPU"], info["first_rank"]) for number, info in opened.items()}
    assert mine == {0: ("first", 1), 2: ("first", 2), 3: ("second", 3)} and memory["another"] == ["third", "fourth"]
