"""Responses whose judges are replaced while they are scored: asked again where the judges are now."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dapo.config.reward import OverlongBufferConfig, RewardConfig, RewardFunctionConfig
from dapo.types import Score
from tests.support.fakes import make_prompt, make_response
from workers import reward as module
from workers.remote import RemoteError
from workers.scoring.verdict import Verdict, verdict_of_failure

BEFORE, AFTER = [{"url": "http://a", "key": "old"}], [{"url": "http://a", "key": "new"}]
RIGHT = Score(accuracy=1.0, reward=1.0, parts={"judge": 1.0}, metrics={}, prediction="", failure="")


class Judges:
    """Moves on to the next list of servers whenever a response was not answered; None: all are given up."""

    restarts = 0

    def __init__(self, *lists: Any) -> None:
        self.failure, self.lists = "", list(lists)

    async def there(self) -> Any:
        if self.lists[0] is None:
            self.failure = "no judge is left"
        return self.lists[0] or []

    def stop(self) -> None:
        pass


class Fleet:
    """Has an answer at `AFTER` alone."""

    def __init__(self, judges: Judges) -> None:
        self.asked: list[Any] = []
        self._judges = judges

    async def score(self, item: Any, *, avoid: int) -> tuple[Verdict, int]:
        self.asked.append(list(item.servers))
        if item.servers == AFTER:
            return Verdict(score=RIGHT, detail="", cpu_s=0.0, wall_s=0.0), 0
        if len(self._judges.lists) > 1:
            self._judges.lists.pop(0)
        return verdict_of_failure("remote", "nobody answers", 0.0), 0


def scored(judges: Any, monkeypatch: pytest.MonkeyPatch, entry: str = "") -> tuple[Score, list[Any]]:
    fleet = Fleet(judges)
    monkeypatch.setattr(module, "Fleet", lambda *_, **__: fleet)
    cfg = RewardConfig(
        functions=[RewardFunctionConfig(path="judge")], overlong_buffer=OverlongBufferConfig(enable=False)
    )
    pool = module.RewardPool({}, cfg, max_response_length=20, judges=judges)
    pool._asks = {"": True, "sums": False}  # as its workers say at their start
    scoring = pool.score(replace(make_prompt(0), entry=entry), 0, make_response())
    return asyncio.run(asyncio.wait_for(scoring, 3)), fleet.asked


def test_a_response_is_judged_where_the_judges_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    score, asked = scored(Judges(BEFORE, AFTER), monkeypatch)
    assert score.reward == 1.0 and asked == [BEFORE, AFTER]


def test_a_source_that_asks_nobody_waits_for_no_judge_to_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(Judges):
        async def there(self) -> Any:
            await asyncio.Event().wait()

    score, asked = scored(Away([]), monkeypatch, entry="sums")
    assert score.failure == "remote" and asked == [[]], "the stand-in for workers knows no other answer"
    with pytest.raises(TimeoutError):
        scored(Away([]), monkeypatch)


def test_judges_that_stay_and_do_not_answer_make_it_unscorable(monkeypatch: pytest.MonkeyPatch) -> None:
    score, asked = scored(Judges(BEFORE), monkeypatch)
    assert score.failure == "remote" and asked[-1] == BEFORE and len(asked) <= 2


def test_a_server_that_is_away_for_too_long_ends_the_run_with_the_keys_to_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES_IN_A_ROW", 1)
    with pytest.raises(RemoteError, match=r"nobody answers; see to the server .*`reward.remote.timeout_s`"):
        scored(Judges(BEFORE), monkeypatch)


def test_a_response_that_may_be_what_ends_them_does_not_end_them_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = [[{"url": "http://a", "key": "old", "start": f"{number}"}] for number in range(20)]
    score, asked = scored(Judges(*starts), monkeypatch)
    assert score.failure == "remote" and asked == starts[:4]


def test_without_judges_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match="no judge is left"):
        scored(Judges(BEFORE, None), monkeypatch)
