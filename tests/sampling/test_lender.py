"""When the actors' GPUs change hands, on stand-ins: what is tried, what is measured, what an update waits for."""

import asyncio

import pytest

from dapo.sampling.lender import Lender
from dapo.sampling.lending import Slots


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
        assert await world.step(0) == {
            "perf/lending/wakes": 0.0,
            "perf/lending/awake_s": 0.0,
            "perf/lending/forecast_s": 0.0,
        }
        first = await world.step(1, seconds=7.0)
        assert world.events == ["update", "wake", "serve", "sleep", "update"]
        assert first == {
            "perf/lending/wakes": 1.0,
            "perf/lending/awake_s": 7.0,
            "perf/lending/forecast_s": 0.0,
            "perf/lending/wake_s": 4.0,
            "perf/lending/sleep_s": 2.0,
        }
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
