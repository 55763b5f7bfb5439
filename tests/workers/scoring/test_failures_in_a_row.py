"""Responses without a verdict, one after the other: when they end the run."""

import asyncio
from typing import Any

import pytest

from dapo.config.reward import OverlongBufferConfig, RewardConfig
from dapo.types import Score
from tests.support.fakes import make_prompt, make_response
from workers import reward as module
from workers.remote import RemoteError
from workers.scoring.verdict import Verdict, verdict_of_failure

RIGHT = Score(accuracy=1.0, reward=1.0, parts={"judge": 1.0}, metrics={}, prediction="", failure="")


class Fleet:
    """Has no verdict on what is longer than `most` tokens; the judge's context may end there."""

    def __init__(self, most: int) -> None:
        self.most = most

    async def score(self, item: Any, *, avoid: int) -> tuple[Verdict, int]:
        if item.extra_info["num_response_tokens"] > self.most:
            return verdict_of_failure("error", "the server answered 400", 0.0), 0
        return Verdict(score=RIGHT, detail="", cpu_s=0.0, wall_s=0.0), 0


def scored(monkeypatch: pytest.MonkeyPatch, lengths: list[int], most: int, later: int = -1) -> list[str]:
    """The failures of responses of these lengths, scored in this order. later: `most` from the middle on."""
    fleet = Fleet(most)
    monkeypatch.setattr(module, "Fleet", lambda *_, **__: fleet)
    monkeypatch.setattr(module, "MAX_FAILURES_IN_A_ROW", 4)
    pool = module.RewardPool(
        {}, RewardConfig(overlong_buffer=OverlongBufferConfig(enable=False)), max_response_length=9
    )

    async def run() -> list[str]:
        found = []
        for number, length in enumerate(lengths):
            if later >= 0 and number == len(lengths) // 2:
                fleet.most = later
            found.append((await pool.score(make_prompt(0), 0, make_response(length))).failure)
        return found

    return asyncio.run(run())


def test_the_longest_responses_of_a_step_that_have_no_verdict_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end together, behind all others."""
    step = [3, 4, 5, 6, 7, 7, 8, 8, 9, 9]
    assert scored(monkeypatch, step * 2, most=5) == (["", "", "", *["error"] * 7]) * 2


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"lengths": [9] * 4, "most": 5}, id="no-verdict-at-all"),
        pytest.param({"lengths": [5] * 8, "most": 5, "later": 0}, id="no-verdict-any-more"),
    ],
)
def test_functions_that_give_no_verdict_end_it(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    with pytest.raises(RemoteError, match="no verdict on 4 responses in a row.*answered 400"):
        scored(monkeypatch, **case)
