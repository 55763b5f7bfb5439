"""Responses whose judges are replaced or away while they are scored: asked again, where the judges are now."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from dapo.config.reward import OverlongBufferConfig, RemoteConfig, RewardConfig, RewardFunctionConfig
from dapo.types import Score
from tests.support.fakes import make_prompt, make_response
from workers import reward as module
from workers.remote import RemoteError
from workers.scoring import asking
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

    async def heard(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Fleet:
    """Has an answer at `AFTER` alone. before: what it gives before anything else, kinds of failure."""

    def __init__(self, judges: Judges | None, *before: str, after_s: float = 0.0) -> None:
        self.asked: list[Any] = []
        self._after_s = after_s
        self._judges, self._before = judges, list(before)

    async def score(self, item: Any, *, avoid: int) -> tuple[Verdict, int]:
        self.asked.append(list(item.servers))
        if self._before:
            return verdict_of_failure(self._before.pop(0), "nobody is there", 0.0, self._after_s), 0
        if self._judges is None or item.servers == AFTER:
            return Verdict(score=RIGHT, detail="", cpu_s=0.0, wall_s=0.0), 0
        if len(self._judges.lists) > 1:
            self._judges.lists.pop(0)
        return verdict_of_failure("remote", "nobody answers", 0.0), 0


def scored(
    judges: Any,
    monkeypatch: pytest.MonkeyPatch,
    entry: str = "",
    before: tuple[str, ...] = (),
    patience_s: float = 60.0,
    warnings: list[str] | None = None,
    limit_s: float = 60.0,
    after_s: float = 0.0,
) -> tuple[Score, list[Any]]:
    fleet = Fleet(judges, *before, after_s=after_s)
    monkeypatch.setattr(module, "Fleet", lambda *_, **__: fleet)
    monkeypatch.setattr(asking, "PAUSE_S", 0.001)
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.01)
    cfg = RewardConfig(
        functions=[RewardFunctionConfig(path="judge")],
        overlong_buffer=OverlongBufferConfig(enable=False),
        remote=RemoteConfig(patience_s=patience_s),
    )
    warn = [].append if warnings is None else warnings.append
    pool = module.RewardPool({}, cfg, max_response_length=20, judges=judges, warn=warn)
    pool._asks = {"": True, "sums": False}  # as its workers say at their start
    scoring = pool.score(replace(make_prompt(0), entry=entry), 0, make_response())
    return asyncio.run(asyncio.wait_for(scoring, limit_s)), fleet.asked


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
        scored(Away([]), monkeypatch, limit_s=1.0)


def test_judges_that_stay_and_do_not_answer_make_it_unscorable(monkeypatch: pytest.MonkeyPatch) -> None:
    score, asked = scored(Judges(BEFORE), monkeypatch)
    assert score.failure == "remote" and asked[-1] == BEFORE and len(asked) <= 2


def test_a_server_that_is_away_for_too_long_ends_the_run_with_the_keys_to_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES_IN_A_ROW", 1)
    with pytest.raises(RemoteError, match=r"nobody answers; see to the server .*`reward.remote.timeout_s`"):
        scored(Judges(BEFORE), monkeypatch)
    with pytest.raises(RemoteError, match=r"nobody is there; see to the server .*`reward.remote.patience_s`"):
        scored(None, monkeypatch, before=("away",) * 1000, patience_s=0.1)


def test_a_response_waits_for_an_endpoint_that_takes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that somebody starts again is away for minutes, far longer than the retries of its calls."""
    warnings: list[str] = []
    score, asked = scored(None, monkeypatch, before=("away",) * 9, warnings=warnings)
    assert score.reward == 1.0 and len(asked) == 10
    assert warnings == [
        "reward: nobody is there; responses wait for a server to be there, 60 s at most (`reward.remote.patience_s`)"
    ]


def test_an_endpoint_is_left_alone_for_as_long_as_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    score, asked = scored(None, monkeypatch, before=("away",) * 3, after_s=0.2)
    assert score.reward == 1.0 and len(asked) == 4 and time.monotonic() - began >= 0.6
    score, asked = scored(None, monkeypatch, before=("away",) * 3, after_s=3600.0, patience_s=0.2)
    assert score.failure == "away" and len(asked) == 2  # the last time at the end of its patience


def test_an_endpoint_that_is_there_and_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response may be why."""
    score, asked = scored(None, monkeypatch, before=("away", "remote", "away"))
    assert score.failure == "remote" and len(asked) == 2


def test_without_patience_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    score, asked = scored(None, monkeypatch, before=("away", "away"), patience_s=0.0, warnings=warnings)
    assert score.failure == "away" and len(asked) == 1
    assert not any("responses wait" in warning for warning in warnings)


def test_a_judge_that_stands_still_and_is_not_yet_found_to_makes_nothing_unscorable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Still(Judges):
        async def heard(self) -> None:
            self.lists = [AFTER]

    score, asked = scored(Still(BEFORE), monkeypatch, before=("remote",))
    assert score.reward == 1.0 and asked == [BEFORE, AFTER]


@pytest.mark.parametrize("failure", ["away", "remote"])
def test_a_response_that_is_tried_elsewhere_waits_as_well(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that asks may be lost in the same minute as the server."""

    class Restarted(Judges):
        async def heard(self) -> None:
            self.lists = [AFTER]

    judges = Restarted(BEFORE) if failure == "remote" else None
    score, asked = scored(judges, monkeypatch, before=("crash", failure))
    assert score.reward == 1.0 and len(asked) == 3


def test_a_response_that_may_be_what_ends_them_does_not_end_them_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = [[{"url": "http://a", "key": "old", "start": f"{number}"}] for number in range(20)]
    score, asked = scored(Judges(*starts), monkeypatch)
    assert score.failure == "remote" and asked == starts[:4]


def test_without_judges_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match="no judge is left"):
        scored(Judges(BEFORE, None), monkeypatch)
