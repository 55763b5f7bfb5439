"""What the pool makes of verdicts: asks again where judges were replaced or away, adds penalties, ends the run."""

import asyncio
import math
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from dapo.config.reward import OverlongBufferConfig, RemoteConfig, RewardConfig, RewardFunctionConfig, RewardModelConfig
from dapo.types import Score
from dapo.workers import reward
from dapo.workers.remote import RemoteError
from dapo.workers.scoring import asking
from dapo.workers.scoring.fleet import WorkerLost
from dapo.workers.scoring.verdict import Verdict, verdict_of_failure
from tests.support.fakes import make_prompt, make_response

BEFORE, AFTER = [{"url": "http://a", "key": "old"}], [{"url": "http://a", "key": "new"}]
RIGHT = Score(accuracy=1.0, reward=1.0, parts={"judge": 1.0}, metrics={}, prediction="", failure="")


@pytest.fixture(autouse=True)
def short_pauses_and_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "Fleet", lambda *_, **__: None)
    monkeypatch.setattr(asking, "PAUSE_S", 0.001)
    monkeypatch.setattr(reward, "RETRY_PAUSE_S", 0.01)


class Judges:
    """Moves on to the next list of servers whenever a response was not answered; None: all are given up. heard: the
    list once the judges were heard."""

    def __init__(self, *lists: Any, heard: Any = None) -> None:
        self.failure, self.lists, self._heard = "", list(lists), heard

    async def there(self) -> Any:
        if self.lists[0] is None:
            self.failure = "no judge is left"
        return self.lists[0] or []

    async def heard(self) -> None:
        self.lists = [self._heard] if self._heard else self.lists


class Away(Judges):
    async def there(self) -> Any:
        await asyncio.Event().wait()


class Fleet:
    """Has an answer at `AFTER` alone. before: what it gives before anything else, kinds of failure. most: tokens of a
    response that it can score; a judge's context may end there."""

    def __init__(self, judges: Judges | None = None, before: str = "", after_s: float = 0.0, most: int = 99) -> None:
        self.asked: list[Any] = []
        self.most = most
        self._judges, self._before, self._after_s = judges, before.split(), after_s

    async def score(self, item: Any, *, avoid: int) -> tuple[Verdict, int]:
        self.asked.append(list(item.servers))
        if item.extra_info["num_response_tokens"] > self.most:
            return verdict_of_failure("error", "the server answered 400", 0.0), 0
        if self._before[:1] == ["lost"]:
            self._before.pop(0)
            raise WorkerLost("its worker was lost", 1)
        if self._before:
            return verdict_of_failure(self._before.pop(0), "nobody is there", 0.0, self._after_s), 0
        if self._judges is None or item.servers == AFTER:
            return Verdict(score=RIGHT, detail="", cpu_s=0.0, wall_s=0.0), 0
        if len(self._judges.lists) > 1:
            self._judges.lists.pop(0)
        return verdict_of_failure("remote", "nobody answers", 0.0), 0


def pool_over(fleet: Any, patience_s: float = 60.0, **how: Any) -> reward.RewardPool:
    cfg = RewardConfig(
        functions=[RewardFunctionConfig(path="judge")],
        overlong_buffer=OverlongBufferConfig(enable=True, len=8, penalty_factor=1.0),
        remote=RemoteConfig(patience_s=patience_s),
        model=RewardModelConfig(weight=2.0),
    )
    pool = reward.RewardPool({}, cfg, max_response_length=20, **how)
    pool.fleet, pool._asks = fleet, {"": True, "sums": False}  # as its workers say at their start
    return pool


def scored(
    judges: Any, before: str = "", entry: str = "", limit_s: float = 60.0, after_s: float = 0.0, **how: Any
) -> Any:
    """The failure of a response, "" for its verdict, and the servers that were asked."""
    fleet = Fleet(judges, before, after_s)
    scoring = pool_over(fleet, judges=judges, **how).score(replace(make_prompt(0), entry=entry), 0, make_response())
    found = asyncio.run(asyncio.wait_for(scoring, limit_s))
    assert math.isnan(found.reward) if found.failure else found.reward == 1.0
    return found.failure, fleet.asked


def test_a_response_is_judged_where_the_judges_are_now() -> None:
    assert scored(Judges(BEFORE, AFTER)) == ("", [BEFORE, AFTER])
    failure, asked = scored(Judges(BEFORE))
    assert failure == "remote" and asked[-1] == BEFORE and len(asked) <= 2, "they stay, and do not answer"
    starts = [[{"url": "http://a", "key": "old", "start": f"{number}"}] for number in range(20)]
    assert scored(Judges(*starts)) == ("remote", starts[:4]), "the response may be what ends them"
    with pytest.raises(RemoteError, match="no judge is left"):
        scored(Judges(BEFORE, None))


def test_a_source_that_asks_nobody_waits_for_no_judge_to_start_again() -> None:
    assert scored(Away([]), entry="sums") == ("remote", [[]]), "the stand-in for workers knows no other answer"
    with pytest.raises(TimeoutError):
        scored(Away([]), limit_s=0.3)


def test_a_server_that_is_away_for_too_long_ends_the_run_with_the_keys_to_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward, "MAX_FAILURES_IN_A_ROW", 1)
    with pytest.raises(RemoteError, match=r"nobody answers; see to the server .*`reward.remote.timeout_s`"):
        scored(Judges(BEFORE))
    with pytest.raises(RemoteError, match=r"nobody is there; see to the server .*`reward.remote.patience_s`"):
        scored(None, "away " * 1000, patience_s=0.1)


def test_a_response_waits_for_an_endpoint_that_takes_no_connection() -> None:
    """A judge that somebody starts again is away for minutes, far longer than the retries of its calls."""
    warnings: list[str] = []
    assert scored(None, "away " * 9, warn=warnings.append) == ("", [[]] * 10)
    assert warnings == [
        "reward: nobody is there; responses wait for a server to be there, 60 s at most (`reward.remote.patience_s`)"
    ]
    assert scored(None, "away remote away") == ("remote", [[]] * 2), "it is there, and the response may be why"
    assert scored(None, "away away", patience_s=0.0) == ("away", [[]])


def test_an_endpoint_is_left_alone_for_as_long_as_it_asks() -> None:
    began = time.monotonic()
    assert scored(None, "away " * 3, after_s=0.1) == ("", [[]] * 4) and time.monotonic() - began >= 0.3
    # The last time at the end of its patience.
    assert scored(None, "away " * 3, after_s=3600.0, patience_s=0.1) == ("away", [[]] * 2)


def test_a_response_whose_worker_is_lost_is_scored_by_another() -> None:
    assert scored(None, "lost") == ("", [[]] * 2)
    failure, asked = scored(None, "lost " * 100)
    assert failure == "crash" and len(asked) == 2 * reward.TRIES, "and then it is unscorable, not wrong"


@pytest.mark.parametrize("before", ["away", "crash away", "remote", "crash remote"])
def test_a_judge_that_starts_again_makes_nothing_unscorable(before: str) -> None:
    """Nor where the process that asks is lost in the same minute."""
    judges = Judges(BEFORE, heard=AFTER) if "remote" in before else None
    failure, asked = scored(judges, before)
    assert failure == "" and len(asked) == len(before.split()) + 1


def test_many_responses_in_a_row_without_a_verdict_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "MAX_FAILURES_IN_A_ROW", 4)

    async def failures_of(lengths: list[int], later: int) -> list[str]:
        """later: the most tokens from the middle on, 5 before."""
        fleet, found = Fleet(most=5), []
        pool = pool_over(fleet)
        for number, length in enumerate(lengths):
            fleet.most = later if number >= len(lengths) // 2 else 5
            found.append((await pool.score(make_prompt(0), 0, make_response(length))).failure)
        return found

    step = [3, 4, 5, 6, 7, 7, 8, 8, 9, 9]  # the longest end together, behind all others: that ends no run
    assert asyncio.run(failures_of(step * 2, later=5)) == (["", "", "", *["error"] * 7]) * 2
    for lengths, later in (([9] * 4, 5), ([5] * 8, 0)):
        with pytest.raises(RemoteError, match="no verdict on 4 responses in a row.*answered 400"):
            asyncio.run(failures_of(lengths, later))


class RewardModel:
    """The pool of a reward model that gives what it is told to."""

    def __init__(self, value: float) -> None:
        self.value = value

    async def score(self, prompt: Any, response: Any) -> float:
        return self.value


def test_the_reward_adds_the_overlong_penalty_and_the_reward_model() -> None:
    def score(length: int, value: float) -> Score:
        pool = pool_over(Fleet(), model=RewardModel(value))
        return asyncio.run(pool.score(make_prompt(0), 0, make_response(length)))

    for length, value, penalty in ((12, 0.0, 0.0), (16, 0.5, -0.5), (20, -1.0, -1.0)):
        found = score(length, value)
        assert (found.accuracy, found.reward, found.failure) == (1.0, 1.0 + penalty + 2.0 * value, "")
        assert found.parts == {"judge": 1.0, "overlong": penalty, "reward_model": value}
    unknown = score(12, math.nan)
    assert math.isnan(unknown.accuracy) and math.isnan(unknown.reward) and unknown.failure == "model"


@pytest.mark.parametrize("parts", [{"mine": math.nan}, {"mine": 1.0}], ids=["score", "acc"])
def test_a_function_that_gives_nothing_is_told_and_ends_the_run(
    parts: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one without a `return` does."""
    monkeypatch.setattr(reward, "MAX_FAILURES_IN_A_ROW", 5)
    nothing = Verdict(
        score=replace(RIGHT, accuracy=math.nan, reward=math.nan, parts=parts), detail="", cpu_s=0.0, wall_s=0.0
    )
    warnings: list[str] = []

    class Silent(Fleet):
        async def score(self, item: Any, *, avoid: int) -> tuple[Verdict, int]:
            return nothing, 0

    async def scores() -> None:
        pool = pool_over(Silent(), warn=warnings.append)
        for sample in range(9):
            found = await pool.score(make_prompt(0), sample, make_response())
            assert math.isnan(found.accuracy) and not found.failure

    with pytest.raises(RemoteError, match=r"no verdict on 5 responses in a row.*response 4: .*None or NaN.*`return`"):
        asyncio.run(scores())
    assert [re.findall(r"number (\d+)", warning) for warning in warnings] == [["1"], ["2"], ["3"], ["4"]]
    assert all(("`mine`" in warning) == math.isnan(parts["mine"]) for warning in warnings)
