"""The ready judge through its real process: a server that fails for a while changes no reward, and one that never
answers makes nothing wrong."""

import asyncio
import math
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from dapo.config.reward import JudgeConfig, LimitsConfig, RemoteConfig, RewardConfig, RewardFunctionConfig
from dapo.rewards import judge
from dapo.rewards.calling.calls import Retry
from dapo.rewards.calling.fork_server import Item
from dapo.rewards.calling.loading import with_judge
from dapo.rewards.judge import read_score
from dapo.workers.scoring.children import Children
from dapo.workers.scoring.verdict import Verdict
from tests.support.rewards.judge_server import KEY, JudgeServer, judge_server

FAULTS = ("500", "429", "cut", "no json", "silent", "half", "no score", "score outside")
QUICK = RemoteConfig(timeout_s=50.0, call_timeout_s=1.0, retries=12, backoff_s=0.005)


def judged(server: JudgeServer, **judge: Any) -> RewardConfig:
    config = JudgeConfig(url=server.url, model="judge", prompt="{ground_truth}|{response}", prompt_cost=2.0)
    return RewardConfig(functions=[RewardFunctionConfig(path="judge", wrong=0.0)], judge=replace(config, **judge))


def verdicts(config: RewardConfig, count: int = 24, remote: RemoteConfig = QUICK, **options: Any) -> list[Verdict]:
    """Scores `count` responses at once, every third of them wrong."""
    items = [
        Item(source="s", text=f"It is {n if n % 3 else n + 1}", ground_truth=f"{n}", extra_info={"prompt": "?"})
        for n in range(count)
    ]

    async def run() -> list[Verdict]:
        limits = LimitsConfig(wall_s=10.0, **options.pop("limits", {}))
        async with Children(
            with_judge(config.functions, config.judge), limits, 2, remote, **{"concurrency": 32, **options}
        ) as children:
            async with asyncio.timeout(120):
                return list(await asyncio.gather(*[children.score(item) for item in items]))

    return asyncio.run(run())


def rewards(found: list[Verdict]) -> list[float]:
    return [one.score.reward for one in found]


def test_the_judge_scores_with_its_costs() -> None:
    with judge_server(key=KEY) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_API_KEY", f"{KEY}\n")  # as a file holds it
        found = verdicts(judged(server, key_variable="JUDGE_API_KEY"))
    assert rewards(found) == [float(n % 3 > 0) for n in range(24)]
    metrics = found[0].score.metrics
    latency = metrics.pop("judge/latency_s")
    assert 0 < latency < 1
    assert metrics == {
        "judge/retries": metrics["judge/retries"],
        "judge/prompt_tokens": 20.0,
        "judge/completion_tokens": 5.0,
        "judge/cost": 4e-5,
    }


def test_faults_change_no_reward() -> None:
    with judge_server(*FAULTS) as server:
        found = verdicts(judged(server))
    assert rewards(found) == [float(n % 3 > 0) for n in range(24)]
    assert set(server.seen) == {*FAULTS, "answered"}


@pytest.mark.parametrize("fault", ["500", "silent"])
def test_a_server_that_never_answers_makes_responses_unscorable(fault: str) -> None:
    with judge_server(always=fault) as server:
        found = verdicts(judged(server), 6, replace(QUICK, timeout_s=1.5, retries=3))
    assert {one.score.failure for one in found} == {"remote"}
    assert all(math.isnan(reward) for reward in rewards(found))
    assert all("calls were not answered" in one.detail for one in found)


def test_a_server_that_is_not_there_is_told_from_one_that_does_not_answer() -> None:
    """Nobody has seen the response then: the pool waits for such a server (`reward.remote.patience_s`)."""
    short = replace(QUICK, retries=1)
    with judge_server(always="503") as server:  # as a gateway says, or a server that loads its model
        found = verdicts(judged(server), 2, short)
    found += verdicts(judged(server), 2, short)  # its port is closed now
    with judge_server(always="429") as server:  # a limit of calls, of which there may be one for long
        found += verdicts(judged(server), 2, short)
    assert [one.score.failure for one in found] == ["away"] * 6
    assert "answered 503" in found[0].detail and "ConnectError" in found[2].detail and "429" in found[4].detail
    assert [one.after_s for one in found] == [0.0] * 4 + [0.3] * 2
    assert all(math.isnan(reward) for reward in rewards(found))


@pytest.mark.parametrize(("temperature", "calls"), [(0.0, 3), (0.7, 6)])
def test_a_greedy_judge_is_not_paid_for_the_same_reply_again_and_again(temperature: float, calls: int) -> None:
    """`max_tokens` may cut the reply off before its score, every time alike."""
    with judge_server(always="no score") as server:
        found = verdicts(judged(server, temperature=temperature), 2, replace(QUICK, retries=5))
    assert server.seen == {"no score": 2 * calls}
    assert [one.score.failure for one in found] == ["remote"] * 2
    assert f"{calls} calls were not answered; the last: Retry: the judge's reply has no score" in found[0].detail


def test_a_judge_that_is_only_recorded_makes_nothing_unscorable() -> None:
    with judge_server(always="500") as server:
        config = judged(server)
        config.functions = [RewardFunctionConfig(path="math"), replace(config.functions[0], weight=0.0)]
        found = verdicts(config, 3, replace(QUICK, retries=1))
    assert [one.score.failure for one in found] == [""] * 3
    assert all(math.isnan(one.score.parts["judge"]) and one.score.reward == -1.0 for one in found)


def test_a_refused_request_is_an_error_that_names_the_keys_and_not_their_value() -> None:
    with judge_server(key=KEY) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_API_KEY", "another-key")
        found = verdicts(judged(server, key_variable="JUDGE_API_KEY"), 2)
    assert [one.score.failure for one in found] == ["error"] * 2
    assert "401" in found[0].detail and "reward.judge.key_variable" in found[0].detail
    assert "another-key" not in found[0].detail
    assert server.seen == {}  # and it is not asked again and again


def test_what_is_read_of_a_response() -> None:
    """A reply that ended in its thoughts is one without a score, not a failure of the server."""
    body = {"choices": [{"message": {"content": None, "reasoning_content": "So"}}], "usage": {"prompt_tokens": 3}}
    assert judge._read(httpx.Response(200, json=body)) == ("", {"prompt_tokens": 3})
    for status, says in ((400, "too long for its context"), (404, "`reward.judge.model`")):
        with pytest.raises(ValueError, match=f"{status}.*{says}"):
            judge._read(httpx.Response(status))


SCORES = {
    "So it is right.\nScore: 1": 1.0,
    "Score: 0.5.": 0.5,
    "**Score:** 0.8": 0.8,
    "**Score: 1**": 1.0,
    "Score: **0**": 0.0,
    "Score: 1/1": 1.0,
    "Score: 0, because 1 is not it": 0.0,
    "Score: 0\nScore: 1": 1.0,
}
NO_SCORES = ("Score: 1/10", "Score: 1 / 5", "Score: 1%", "Score: 0,5", "Score: 10/100", "Score: N")


def test_a_score_is_read_from_what_models_make_of_the_line() -> None:
    keys = JudgeConfig()
    read = partial(read_score, values={}, lowest=keys.lowest, highest=keys.highest)
    assert {reply: read(reply, pattern=keys.pattern) for reply in SCORES} == SCORES
    for reply in NO_SCORES:
        with pytest.raises(Retry):
            read(reply, pattern=keys.pattern)
    either = r"Score: (\d)|END"  # the last match that has a score counts
    assert read("Score: 1 END", pattern=either) == 1.0
    with pytest.raises(Retry, match="has no score"):
        read("END", pattern=either)


def test_a_network_for_the_judge_is_none_for_the_others(tmp_path: Any) -> None:
    (tmp_path / "plain.py").write_text(
        "import socket\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    try:\n        socket.socket()\n        return 1.0\n    except OSError:\n        return 0.5\n"
    )
    with judge_server() as server:
        config = judged(server)
        config.functions.append(RewardFunctionConfig(path=str(tmp_path / "plain.py")))
        found = verdicts(config, 2)
    assert [one.score.parts for one in found] == [
        {"judge": 0.0, "compute_score": 0.5},
        {"judge": 1.0, "compute_score": 0.5},
    ]
