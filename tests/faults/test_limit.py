"""The wall-clock limit of a process: when a run leaves, and what may still begin."""

import asyncio
import time

import pytest

from dapo.config.compose import compose
from dapo.faults import limit as limit_module
from dapo.faults.limit import ROOM, UNSEEN, TimeLimit, TimeLimitReached
from dapo.main_ppo import launch
from dapo.state.run_dir import claim_output_dir


@pytest.fixture
def now(monkeypatch) -> list[float]:
    moment = [1000.0]
    monkeypatch.setattr(limit_module.time, "monotonic", lambda: moment[0])
    return moment


def measure(limit: TimeLimit, now: list[float], act: str, seconds: float) -> None:
    with limit.measuring(act):
        now[0] += seconds


def test_without_a_limit_nothing_is_cut_short(now):
    limit = TimeLimit()
    measure(limit, now, "save", 1e9)
    limit.check("update", "save")
    assert limit.leave_at("save") is None

    async def body() -> str:
        async with limit.leaving("save"):
            await asyncio.sleep(0)
        return "done"

    assert asyncio.run(body()) == "done"


def test_what_was_seen_sets_the_moment(now):
    limit = TimeLimit(2.0, began=1000.0)
    whole = 7200.0
    assert limit.leave_at() == 1000 + whole
    assert limit.leave_at("save") == pytest.approx(1000 + whole - UNSEEN * whole)
    assert limit.leave_at("update", "save") == pytest.approx(1000 + whole - 2 * UNSEEN * whole)
    measure(limit, now, "save", 100)
    measure(limit, now, "save", 40)
    assert limit.leave_at("save") == pytest.approx(1000 + whole - ROOM * 100), "the longest counts"
    measure(limit, now, "update", 10)
    assert limit.leave_at("update", "save") == pytest.approx(1000 + whole - ROOM * 110)


def test_an_act_that_fails_is_measured_too(now):
    limit = TimeLimit(1.0, began=1000.0)
    with pytest.raises(OSError, match="full"), limit.measuring("save"):
        now[0] += 60
        raise OSError("full")
    assert limit.leave_at("save") == pytest.approx(1000 + 3600 - ROOM * 60)


def test_what_would_not_end_in_time_does_not_begin(now):
    limit = TimeLimit(1.0, began=1000.0)
    measure(limit, now, "save", 100)
    measure(limit, now, "update", 200)
    now[0] = 1000 + 3600 - ROOM * 300 - 1
    limit.check("update", "save")
    now[0] += 2
    with pytest.raises(TimeLimitReached, match=r"`trainer.max_hours` \(1\) .*the same command continues the run"):
        limit.check("update", "save")
    limit.check("save")


def hours(seconds: float) -> float:
    return seconds / 3600


def ends(limit: TimeLimit, work) -> str:
    async def body() -> None:
        async with limit.leaving("save"):
            await work()

    try:
        asyncio.run(body())
    except (TimeLimitReached, TimeoutError, RuntimeError) as error:
        return type(error).__name__
    return "done"


def test_waiting_is_left_while_there_is_time_to_save():
    began = time.monotonic()
    limit = TimeLimit(hours(1.0), began)
    with limit.measuring("save"):
        time.sleep(0.4)
    assert ends(limit, asyncio.Event().wait) == "TimeLimitReached"
    assert limit.leave_at("save") <= began + 1.0 - 0.4, "a save still ends within the limit"


def test_a_limit_that_is_over_leaves_at_once():
    limit = TimeLimit(hours(1.0), time.monotonic() - 5)
    assert ends(limit, asyncio.Event().wait) == "TimeLimitReached"


def test_what_ends_in_time_or_fails_by_itself_does_so():
    async def nothing() -> None:
        await asyncio.sleep(0)

    async def slow_engine() -> None:
        raise TimeoutError("an engine was waited for")

    async def broken() -> None:
        raise RuntimeError("broken")

    for limit in (TimeLimit(), TimeLimit(1.0, time.monotonic())):
        assert ends(limit, nothing) == "done"
        assert ends(limit, slow_engine) == "TimeoutError", "another deadline is no limit of the run"
        assert ends(limit, broken) == "RuntimeError"


def test_a_signal_is_not_taken_for_the_limit():
    async def body() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with TimeLimit(1.0, time.monotonic()).leaving("save"):
            asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(body())


def test_the_limit_counts_from_before_the_newest_checkpoint_is_hashed(tmp_path, monkeypatch):
    moments: list[float] = []

    def claim(*arguments):
        moments.append(time.monotonic())
        return claim_output_dir(*arguments)

    async def train(cfg, run_dir, store, since):
        moments.append(since)

    monkeypatch.setattr("dapo.main_ppo.claim_output_dir", claim)
    monkeypatch.setattr("dapo.run.train_until_signal", train)
    launch(compose([f"trainer.output_dir={tmp_path}", "trainer.preflight=false"], experiment="dapo_tiny"))
    claimed, since = moments
    assert since <= claimed
