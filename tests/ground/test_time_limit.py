"""The wall-clock limit of a process: when a run leaves, and what may still begin."""

import asyncio
import time

import pytest

from dapo.ground import time_limit as limit_module
from dapo.ground.time_limit import ROOM, UNSEEN, TimeLimit, TimeLimitReached

HOUR_S = 3600.0


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


def test_what_was_seen_sets_the_moment(now):
    limit = TimeLimit(2.0, began=1000.0)
    end = 1000 + 2 * HOUR_S
    assert limit.leave_at() == end
    assert limit.leave_at("save") == pytest.approx(end - UNSEEN * 2 * HOUR_S)
    assert limit.leave_at("update", "save") == pytest.approx(end - 2 * UNSEEN * 2 * HOUR_S)
    measure(limit, now, "save", 100)
    measure(limit, now, "save", 40)
    assert limit.leave_at("save") == pytest.approx(end - ROOM * 100), "the longest counts"
    measure(limit, now, "update", 10)
    assert limit.leave_at("update", "save") == pytest.approx(end - ROOM * 110)
    with pytest.raises(OSError, match="full"), limit.measuring("save"):
        now[0] += 160
        raise OSError("full")
    assert limit.leave_at("save") == pytest.approx(end - ROOM * 160), "one that fails is measured too"


def test_what_would_not_end_in_time_does_not_begin(now):
    limit = TimeLimit(1.0, began=1000.0)
    measure(limit, now, "save", 100)
    measure(limit, now, "update", 200)
    now[0] = 1000 + HOUR_S - ROOM * 300 - 1
    limit.check("update", "save")
    now[0] += 2
    with pytest.raises(TimeLimitReached, match=r"`trainer.max_hours` \(1\) .*the same command continues the run"):
        limit.check("update", "save")
    limit.check("save")


def test_waiting_is_left_while_there_is_time_to_save():
    began = time.monotonic()
    limit = TimeLimit(1.0 / HOUR_S, began)
    with limit.measuring("save"):
        time.sleep(0.2)
    assert limit.leave_at("save") <= began + 1.0 - 0.2, "a save still ends within the limit"
    assert ends(limit, "never") is TimeLimitReached
    assert ends(TimeLimit(1.0 / HOUR_S, began - 5), "never") is TimeLimitReached, "at once"


def ends(limit: TimeLimit, work: str) -> type[BaseException] | None:
    async def body() -> None:
        async with limit.leaving("save"):
            if work == "signal":
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            if work in ("signal", "never"):
                await asyncio.Event().wait()
            if work == "slow engine":
                raise TimeoutError("an engine was waited for")
            if work == "broken":
                raise RuntimeError("broken")

    try:
        asyncio.run(body())
    except BaseException as error:
        return type(error)
    return None


@pytest.mark.parametrize("hours", [0.0, 1.0])
@pytest.mark.parametrize(
    ("work", "end"),
    [("short", None), ("slow engine", TimeoutError), ("broken", RuntimeError), ("signal", asyncio.CancelledError)],
)
def test_what_ends_in_time_or_fails_by_itself_is_not_taken_for_the_limit(hours, work, end):
    assert ends(TimeLimit(hours, time.monotonic()), work) is end
