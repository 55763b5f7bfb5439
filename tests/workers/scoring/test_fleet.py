"""The Ray side of scoring with stand-ins for the workers: dealing, batches, losses. The real ones: test_reward.py."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError

from dapo.rewards.fork_server import Item
from workers.remote import RemoteError
from workers.scoring import fleet as reward_fleet
from workers.scoring.fleet import Fleet
from workers.scoring.verdict import of_end

ITEM = Item(source="test", text="7", ground_truth="7", extra_info={})


class Method:
    """`handle.method.remote(...)`; streaming where the method is an async generator."""

    def __init__(self, function, streams=False):
        self.function, self.streams = function, streams

    def options(self, **options):
        return self

    def remote(self, *arguments):
        if not self.streams:
            return self.function(*arguments)

        async def refs():
            async for part in self.function(*arguments):
                yield _value(part)

        return refs()


async def _value(value):
    return value


class Worker:
    """Answers every item at once, in one part. starts, checks: what happens at each call, an error or None."""

    def __init__(self, log, *, starts=None, checks=None, lost=0, digest="a"):
        self.digest = digest
        self.log, self.starts, self.checks, self.lost = log, starts, checks, lost
        self.start, self.check, self.score = Method(self._start), Method(self._check), Method(self._score, streams=True)

    async def _start(self, *arguments):
        if self.starts:
            raise self.starts
        return {"digest": self.digest}

    async def _check(self):
        if self.checks:
            raise self.checks

    async def _score(self, items):
        self.log.append(len(items))
        if self.lost:
            self.lost -= 1
            raise ActorDiedError()
        yield [(number, of_end("crash", "a verdict", 0.0)) for number in range(len(items))]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(reward_fleet.ray, "kill", lambda handle: None)


def run(workers, body, count=1):
    async def whole():
        waiting = iter(workers)
        fleet = Fleet(lambda: next(waiting), (), count=count, children=1, timeout_s=5.0)
        await fleet.start(5.0)
        async with asyncio.timeout(10):
            try:
                return await body(fleet)
            finally:
                fleet.stop()

    return asyncio.run(whole())


def test_what_waits_goes_half_a_window_at_a_time():
    calls = []

    async def body(fleet):
        return await asyncio.gather(*[fleet.verdict(ITEM) for _ in range(300)])

    assert len(run([Worker(calls)], body)) == 300
    assert sum(calls) == 300 and max(calls) <= reward_fleet.WINDOW
    assert min(calls[:-1]) >= reward_fleet.WINDOW // 2


def test_a_check_that_loses_its_worker_for_good_is_no_success():
    dead = ActorDiedError()

    async def body(fleet):
        with pytest.raises(RemoteError, match="reward worker 0 to start"):
            await fleet.check()
        with pytest.raises(RemoteError):
            await fleet.verdict(ITEM)
        return fleet.respawned

    workers = [Worker([], checks=dead), *[Worker([], starts=dead) for _ in range(reward_fleet.START_ATTEMPTS)]]
    assert run(workers, body) == reward_fleet.START_ATTEMPTS


def test_a_worker_that_dies_while_it_starts_is_tried_again():
    dead = ActorDiedError()
    calls = []

    async def body(fleet):
        lost, _ = await fleet.verdict(ITEM)
        found, _ = await fleet.verdict(ITEM)
        return lost.detail, found.detail, fleet.respawned

    workers = [Worker(calls, lost=1), Worker(calls, starts=dead), Worker(calls)]
    lost, found, respawned = run(workers, body)
    assert "its worker was lost" in lost and (found, respawned) == ("a verdict", 2)


def test_reward_files_that_differ_are_found_at_the_start_and_after_a_loss():
    async def body(fleet):
        with pytest.raises(RemoteError, match="changed during the run"):
            while True:
                await asyncio.gather(*[fleet.verdict(ITEM) for _ in range(100)])

    with pytest.raises(RemoteError, match="differ from node to node"):
        run([Worker([]), Worker([], digest="b")], body, count=2)
    run([Worker([]), Worker([], lost=1), *[Worker([], digest="b") for _ in range(3)]], body, count=2)


def test_a_call_that_ends_early_leaves_no_item_without_an_answer():
    class Forgetful(Worker):
        async def _score(self, items):
            yield [(0, of_end("crash", "a verdict", 0.0))]

    async def body(fleet):
        return await asyncio.gather(*[fleet.verdict(ITEM) for _ in range(3)])

    details = [verdict.detail for verdict, _ in run([Forgetful([])], body)]
    assert details == ["a verdict", "its worker gave no verdict", "its worker gave no verdict"]


def test_nobody_waits_for_cancelled_items():
    calls = []

    async def body(fleet):
        tasks = [asyncio.ensure_future(fleet.verdict(ITEM)) for _ in range(10)]
        await asyncio.sleep(0)
        for task in tasks[:9]:
            task.cancel()
        return await tasks[9]

    run([Worker(calls)], body)
    assert calls == [1]
