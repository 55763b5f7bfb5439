"""When the actors' GPUs change hands, on stand-ins, and when that pays."""

import asyncio
import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.sampling.lender import Lender
from dapo.sampling.lending import Lending, Slots


class World:
    """Engines that wake in `wake_s` and sleep in `sleep_s`, by a clock that only they and the test move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wake_s: float | None = 4.0
        self.sleep_s = 2.0
        self.failure = ""
        self.events: list[str] = []
        self.let_wake = asyncio.Event()
        self.let_wake.set()
        self.slots = Slots(own=10, lent=10, queued=0, response_s=10.0)
        self.lender = Lender(lambda: self.slots, self.wake, self.sleep, now=lambda: self.now)

    async def wake(self) -> float | None:
        self.events.append("wake")
        await self.let_wake.wait()
        if self.failure:
            raise RuntimeError(self.failure)
        self.now += self.wake_s or 0.0
        return self.wake_s

    async def sleep(self) -> None:
        self.events.append("sleep")
        self.now += self.sleep_s

    async def step(self, missing: int, seconds: float = 0.0) -> dict[str, float]:
        """Collects a batch that lacks so many responses, and gives the GPUs back; returns the metrics."""
        self.lender.consider(missing, lambda: self.events.append("serve"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.now += seconds
        await self.lender.leave()
        self.events.append("update")
        return self.lender.lap()


def test_the_first_time_is_a_trial_and_then_the_measured_seconds_decide():
    async def run():
        world = World()
        nothing = {f"perf/lending/{name}": 0.0 for name in ("wakes", "awake_s", "forecast_s")}
        assert await world.step(0) == nothing
        first = await world.step(1, seconds=7.0)
        assert world.events == ["update", "wake", "serve", "sleep", "update"]
        spent = {"wakes": 1.0, "awake_s": 7.0, "wake_s": 4.0, "sleep_s": 2.0}
        assert first == nothing | {f"perf/lending/{name}": value for name, value in spent.items()}
        world.events.clear()
        # 8 that wait take 8 s of the ten slots; with ten more from 4 s on, 4 + 2: 2 s less, and 2 s to sleep
        assert (await world.step(8))["perf/lending/wakes"] == 0 and world.events == ["update"]
        second = await world.step(18)
        assert second["perf/lending/wakes"] == 1 and second["perf/lending/forecast_s"] == pytest.approx(5.0)
        world.slots = Slots(own=10, lent=10, queued=10, response_s=10.0)
        assert (await world.step(8))["perf/lending/wakes"] == 1, "what waits in the engines waits as well"
        world.wake_s, world.slots = 60.0, Slots(own=10, lent=10, queued=0, response_s=10.0)
        await world.step(50)
        assert (await world.step(50))["perf/lending/wakes"] == 0, "it has become too dear"

    asyncio.run(run())


def test_the_update_waits_for_a_wake_under_way_and_no_engine_wakes_twice_in_a_batch():
    async def run():
        world = World()
        world.let_wake.clear()
        step = asyncio.create_task(world.step(5))
        await asyncio.sleep(0.01)
        for _ in range(3):
            world.lender.consider(100, lambda: None)
        await asyncio.sleep(0.01)
        assert world.events == ["wake"] and not step.done()
        world.let_wake.set()
        await asyncio.wait_for(step, 60)
        assert world.events == ["wake", "serve", "sleep", "update"]

    asyncio.run(run())


@pytest.mark.parametrize(("failure", "wake_s"), [("they are gone", 1.0), ("", None)], ids=["fails", "finds none"])
def test_a_wake_in_vain_costs_the_run_nothing_and_is_tried_again(failure, wake_s, capsys):
    async def run():
        world = World()
        world.failure, world.wake_s = failure, wake_s
        metrics = await world.step(5)
        assert world.events == ["wake", "sleep", "update"], "what started meanwhile must sleep as well"
        assert metrics["perf/lending/awake_s"] == 0 and "perf/lending/wake_s" not in metrics
        assert failure in capsys.readouterr().err
        world.failure, world.wake_s = "", 1.0
        assert (await world.step(5))["perf/lending/wakes"] == 1

    asyncio.run(run())


def test_a_run_that_ends_waits_for_the_wake_and_leaves_the_gpus_to_whom_has_them():
    async def run():
        world = World()
        world.lender.consider(5, lambda: None)
        await world.lender.close()
        await world.lender.close()
        assert world.events == ["wake"]
        await world.lender.leave()
        assert world.events == ["wake"]

    asyncio.run(run())


SECONDS = st.floats(0.0, 300.0)
LENDINGS = st.builds(Lending, own=st.integers(1, 2000), lent=st.integers(0, 2000), wake_s=SECONDS, sleep_s=SECONDS)


@given(lending=LENDINGS, waiting=st.floats(0.0, 10_000.0), response=st.floats(0.1, 500.0))
def test_the_gain_is_never_more_than_the_others_could_take_nor_less_than_the_sleep(lending, waiting, response):
    alone = waiting * response / lending.own
    gain = lending.gain_s(waiting, response)
    share = lending.lent / (lending.own + lending.lent)
    assert -lending.sleep_s - 1e-6 <= gain <= max(0.0, alone - lending.wake_s) * share - lending.sleep_s + 1e-6


def finished(waiting: int, slots: list[float], response: float) -> float:
    """When the last of so many responses starts its slot's next free moment. slots: when each is free at first."""
    heapq.heapify(slots)
    for _ in range(waiting):
        heapq.heapreplace(slots, slots[0] + response)
    return slots[0]


@pytest.mark.parametrize("waiting", [0, 100, 1000, 5000])
@pytest.mark.parametrize(("own", "lent"), [(64, 64), (128, 32), (16, 200)])
@pytest.mark.parametrize("wake", [0.0, 40.0])
def test_against_a_queue_worked_off_slot_by_slot(waiting, own, lent, wake):
    """The next response waits by the gain less long, to within two responses' time: slots free up one by one."""
    response, sleep = 20.0, 7.0
    stagger = [response * slot / own for slot in range(own)]
    late = [max(wake, response * slot / lent) for slot in range(lent)]
    apart = finished(waiting, list(stagger), response)
    together = finished(waiting, stagger + late, response)
    gain = Lending(own=own, lent=lent, wake_s=wake, sleep_s=sleep).gain_s(waiting, response)
    assert abs(gain - (apart - together - sleep)) <= 2 * response
