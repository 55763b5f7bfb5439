"""The Ray side of scoring with stand-ins for the workers: dealing, batches, losses. The real ones: test_reward.py and
test_reward_model.py."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from dapo.config.reward import RewardConfig
from dapo.workers import supervise
from dapo.workers.remote import RemoteError, wait
from dapo.workers.reward import RewardPool
from dapo.workers.scoring.fleet import Fleet, WorkerLost
from dapo.workers.scoring.verdict import CanaryError

ITEM = "an item"
WINDOW = 64


ABOUT = {"reads_last": None, "granted": [], "without_canary": [], "asks": {"": False}, "asynchronous": []}
ABOUT["converses"] = {"": False}
DEAD = ActorDiedError()


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
    """Answers every item in one part, `seconds` for each. starts, checks: what happens at each call, an error or None.
    lost: errors of the first calls."""

    def __init__(self, log=None, *, starts=None, checks=None, lost=(), digest="a", seconds=0.0):
        self.digest, self.seconds = digest, seconds
        self.starts, self.checks, self.lost = starts, checks, lost
        self.log = [] if log is None else log
        self.start, self.check, self.score = Method(self._start), Method(self._check), Method(self._score, streams=True)

    async def _start(self, *arguments):
        if self.starts:
            raise self.starts
        return {**ABOUT, "digest": self.digest, "programs": ""}

    async def _check(self):
        if self.checks:
            raise self.checks

    async def _score(self, items):
        self.log.append(len(items))
        await asyncio.sleep(self.seconds * len(items))
        if self.lost:
            first, *self.lost = self.lost
            raise first
        yield [(number, "a verdict") for number in range(len(items))]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(supervise.ray, "kill", lambda handle: None)


async def start_worker(worker, index, timeout_s):
    [about] = await wait([worker.start.remote()], timeout_s, f"reward worker {index} to start", "a.key")
    return about


def run(workers, body, count=1, timeout_s=5.0, window=WINDOW, **settings):
    async def whole():
        waiting = iter(workers)
        settings.update(name="reward worker", count=count, window=window, timeout_s=timeout_s, timeout_key="a.key")
        fleet = Fleet(lambda index: next(waiting), start_worker, **settings)
        await fleet.workers.start(5.0)
        async with asyncio.timeout(60):
            try:
                return await body(fleet)
            finally:
                fleet.workers.stop()

    return asyncio.run(whole())


def test_what_waits_goes_half_a_window_at_a_time():
    calls = []

    async def body(fleet):
        return await asyncio.gather(*[fleet.score(ITEM) for _ in range(300)])

    assert len(run([Worker(calls)], body)) == 300
    assert sum(calls) == 300 and max(calls) <= WINDOW
    assert min(calls[:-1]) >= WINDOW // 2


def test_a_check_that_loses_its_worker_for_good_is_no_success():
    async def body(fleet):
        with pytest.raises(RemoteError, match="reward worker 0 to start"):
            await fleet.check()
        with pytest.raises(RemoteError):
            await fleet.score(ITEM)
        return fleet.workers.restarts

    workers = [Worker(checks=DEAD), *[Worker(starts=DEAD) for _ in range(supervise.START_ATTEMPTS)]]
    assert run(workers, body) == supervise.START_ATTEMPTS


def test_a_worker_that_dies_while_it_starts_is_tried_again():
    calls = []

    async def body(fleet):
        with pytest.raises(WorkerLost, match="its worker was lost"):
            await fleet.score(ITEM)
        return await fleet.score(ITEM), fleet.workers.restarts

    warnings = []
    workers = [Worker(calls, lost=[DEAD]), Worker(calls, starts=DEAD), Worker(calls)]
    assert run(workers, body, warn=warnings.append) == (("a verdict", 0), 2)
    assert len(warnings) == 2 and "reward worker 0 is replaced: its worker was lost" in warnings[0]
    assert "reward worker 0 did not start: " in warnings[1]


def test_reward_files_that_differ_are_found_at_the_start_and_after_a_loss(monkeypatch):
    async def score(*workers):
        waiting = iter(workers)
        monkeypatch.setattr(RewardPool, "_create", lambda self, index: next(waiting))
        pool = RewardPool({}, RewardConfig(num_workers=2), max_response_length=20)
        try:
            await pool.start(5.0)
            for _ in range(50):
                await asyncio.gather(*[pool.fleet.score(ITEM) for _ in range(20)], return_exceptions=True)
                await pool.fleet.score(ITEM)
        finally:
            pool.stop()

    with pytest.raises(RemoteError, match="differ from node to node"):
        asyncio.run(score(Worker(), Worker(digest="b")))
    with pytest.raises(RemoteError, match="changed during the run"):
        asyncio.run(score(Worker(), Worker(lost=[DEAD]), *[Worker(digest="b") for _ in range(3)]))


def test_a_call_that_ends_early_leaves_no_item_without_an_answer():
    class Forgetful(Worker):
        async def _score(self, items):
            yield [(0, "a verdict")]

    async def body(fleet):
        return await asyncio.gather(*[fleet.score(ITEM) for _ in range(3)], return_exceptions=True)

    first, *others = run([Forgetful()], body)
    assert first == ("a verdict", 0)
    assert [str(error) for error in others] == ["its worker gave no verdict"] * 2


def test_nobody_waits_for_cancelled_items():
    calls = []

    async def body(fleet):
        tasks = [asyncio.ensure_future(fleet.score(ITEM)) for _ in range(10)]
        await asyncio.sleep(0)
        for task in tasks[:9]:
            task.cancel()
        return await tasks[9]

    run([Worker(calls)], body)
    assert calls == [1]


def test_a_cancelled_item_keeps_its_worker_busy_and_costs_the_next_one_no_try():
    """A draw that goes back waits for its verdict no more: its worker goes on, and is neither free nor silent."""

    async def body(fleet):
        gone = asyncio.ensure_future(fleet.score(ITEM))
        await asyncio.sleep(0.1)
        gone.cancel()
        return await fleet.score(ITEM), fleet.workers.restarts

    assert run([Worker(seconds=0.4)], body, timeout_s=0.6) == (("a verdict", 0), 0)


def test_items_are_dealt_by_cost_and_one_of_the_whole_window_goes_alone():
    calls = []

    async def body(fleet):
        return await asyncio.gather(*[fleet.score(ITEM, cost=cost) for cost in (3, 3, 3, 10, 3, 12, 1)])

    run([Worker(calls)], body, window=10, one_call=True)
    assert calls == [3, 1, 1, 1, 1]  # 3 + 3 + 3, then 10, then 3, then more than the window, then 1


def test_a_worker_that_is_lost_with_many_calls_under_way_is_one_loss():
    calls = 2 * supervise.MAX_LOST_IN_A_ROW
    dies = asyncio.Event()

    class Dies(Worker):
        async def _score(self, items):
            self.log.append(len(items))
            await dies.wait()
            raise DEAD
            yield

    async def body(fleet):
        scoring = []
        for number in range(calls):
            scoring.append(asyncio.ensure_future(fleet.score(ITEM)))
            while len(log) <= number:  # a call of its own
                await asyncio.sleep(0.01)
        dies.set()
        lost = await asyncio.gather(*scoring, return_exceptions=True)
        return [type(error) for error in lost], await fleet.score(ITEM), fleet.workers.restarts

    log, warnings = [], []
    assert run([Dies(log), Worker()], body, warn=warnings.append) == ([WorkerLost] * calls, ("a verdict", 0), 1)
    assert len(warnings) == 1


def test_workers_that_are_lost_again_and_again_break_the_fleet_and_a_result_in_between_does_not():
    async def score_until(fleet, count):
        lost = 0
        while lost < count:
            try:
                await fleet.score(ITEM)
            except WorkerLost:
                lost += 1

    async def lost_always(fleet):
        with pytest.raises(RemoteError, match=f"were lost {supervise.MAX_LOST_IN_A_ROW} times in a row"):
            await score_until(fleet, 100)

    run([Worker(lost=[DEAD]) for _ in range(6)], lost_always)

    class EverySecond(Worker):
        async def _score(self, items):
            yield [(0, "a verdict")]
            raise DEAD

    async def lost_with_results(fleet):
        for _ in range(20):
            await fleet.score(ITEM)
            await asyncio.sleep(0.02)
        return fleet.workers.restarts

    assert run([EverySecond() for _ in range(30)], lost_with_results) > supervise.MAX_LOST_IN_A_ROW


OUTCOMES = [
    (CanaryError("7 is not 8"), "reward worker 0: 7 is not 8"),
    (ValueError("odd"), "its worker was lost (ValueError: odd)"),
]


@pytest.mark.parametrize(("cause", "outcome"), OUTCOMES, ids=["known-answers", "any-other-error"])
def test_what_a_worker_raises(cause, outcome):
    async def body(fleet):
        with pytest.raises(RuntimeError) as raised:
            await fleet.score(ITEM)
        return str(raised.value)

    error = RayTaskError("score", "the remote traceback", cause)
    assert run([Worker(lost=[error]), Worker()], body) == outcome
