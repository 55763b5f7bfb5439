"""Ready functions: known answers, the layout of think and answer tags, and Soft Overlong Punishment (Eq. 13)."""

import math
from typing import Any

import pytest

from dapo.config.reward import JudgeConfig, RewardFunctionConfig
from dapo.config.reward_functions import READY
from dapo.rewards import format, overlong
from dapo.rewards.calling.functions import RewardFunctions
from dapo.rewards.calling.loading import with_judge
from dapo.rewards.overlong import overlong_penalty

GOOD = "<think>2 + 2</think>\n<answer>4</answer>"
LENGTHS = {"max_response_length": 20480, "buffer_length": 4096}
ARGUMENTS = {"overlong": LENGTHS, "judge": with_judge([RewardFunctionConfig(path="judge")], JudgeConfig())[0].kwargs}


@pytest.mark.parametrize("name", READY)
def test_ready_functions_have_short_names(name: str) -> None:
    paths = (name, f"dapo.rewards.{name}")
    short, dotted = (RewardFunctionConfig(path=path, kwargs=ARGUMENTS.get(name, {})) for path in paths)
    assert RewardFunctions([short]).labels == RewardFunctions([dotted]).labels == (name,)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *[(name, ARGUMENTS.get(name, {})) for name in READY if name != "judge"],  # its answers are another's
        ("format", {"think": "r", "answer": "o"}),
        ("format", {"opened": True}),
        ("overlong", {**LENGTHS, "penalty_factor": 0.25}),
        ("overlong", {**LENGTHS, "buffer_length": 20480}),
    ],
)
def test_ready_functions_score_their_known_answers(name: str, kwargs: dict[str, Any]) -> None:
    functions = RewardFunctions([RewardFunctionConfig(path=name, kwargs=kwargs)])
    known = functions.canaries()
    assert [functions.score_alone(label, canary) for label, canary in known] == [canary.score for _, canary in known]
    assert len({canary.score for _, canary in known}) >= 2


@pytest.mark.parametrize(
    ("text", "settings", "score"),
    [
        pytest.param(GOOD, {}, 1.0, id="good"),
        pytest.param(f"\n {GOOD} \n", {}, 1.0, id="white-space-outside"),
        pytest.param("<think>a < b > c</think><answer>\n4\n</answer>", {}, 1.0, id="lines-and-brackets-inside"),
        pytest.param("<r>2 + 2</r><o>4</o>", {"think": "r", "answer": "o"}, 1.0, id="other-names"),
        pytest.param("2 + 2</think><answer>4</answer>", {"opened": True}, 1.0, id="opened-by-the-template"),
        pytest.param(GOOD, {"opened": True}, 0.0, id="opened-twice"),
        pytest.param(GOOD, {"think": "reason"}, 0.0, id="not-the-configured-name"),
        pytest.param("2 + 2</think><answer>4</answer>", {}, 0.0, id="never-opened"),
        pytest.param("<answer>4</answer><think>2 + 2</think>", {}, 0.0, id="out-of-order"),
        pytest.param("<think>2<answer>4</think></answer>", {}, 0.0, id="crossed"),
        pytest.param(GOOD + GOOD, {}, 0.0, id="twice"),
        pytest.param("<think><think>2</think><answer>4</answer>", {}, 0.0, id="a-tag-twice"),
        pytest.param("So: " + GOOD, {}, 0.0, id="text-before"),
        pytest.param("<think>2</think> so <answer>4</answer>", {}, 0.0, id="text-between"),
        pytest.param(GOOD + ".", {}, 0.0, id="text-behind"),
        pytest.param("<think> </think><answer>4</answer>", {}, 0.0, id="no-thought"),
        pytest.param("<think>2</think><answer>\n</answer>", {}, 0.0, id="no-answer"),
        pytest.param("", {}, 0.0, id="empty"),
    ],
)
def test_the_layout(text: str, settings: dict[str, Any], score: float) -> None:
    assert format.compute_score("", text, "4", {}, **settings)["score"] == score


def test_the_counts_of_tags_are_metrics_and_the_verdict_is_left_to_others() -> None:
    given = format.compute_score("", "<think></think></think><answer>" * 2, "4")
    assert given == {"score": 0, "think_open": 2, "think_close": 4, "answer_open": 2, "answer_close": 0}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"think": "<think>"}, r"`think` \('<think>'\)"),
        ({"answer": ""}, r"`answer` \(''\)"),
        ({"think": "answer"}, r"`answer` \('answer'\) must differ"),
    ],
)
def test_bad_names_of_tags(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        format.compute_score("", GOOD, "4", {}, **settings)


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (24576, -1.0)],
)
def test_the_penalty_of_the_papers_lengths(num_tokens: int, expected: float, factor: float) -> None:
    penalty = overlong_penalty(num_tokens, **LENGTHS, penalty_factor=factor)
    assert penalty == pytest.approx(expected * factor, abs=1e-9)
    assert penalty or str(penalty) == "0.0", "zero has no sign"
    extra_info = {"num_response_tokens": num_tokens}
    assert overlong.compute_score("", "", "42", extra_info, penalty_factor=factor, **LENGTHS) == penalty
    assert overlong.READS_LAST == 0


@pytest.mark.parametrize(
    ("extra_info", "settings", "named"),
    [
        ({}, {}, r"`extra_info.num_response_tokens` \(None\)"),
        (None, {}, r"`extra_info.num_response_tokens` \(None\)"),
        ({"num_response_tokens": "5"}, {}, r"num_response_tokens` \(5\)"),
        ({"num_response_tokens": 5}, {"buffer_length": 0}, r"`buffer_length` \(0\)"),
        ({"num_response_tokens": 5}, {"buffer_length": 20481}, r"\(20481\).*\(20480\)"),
        ({"num_response_tokens": 5}, {"penalty_factor": -1.0}, r"`penalty_factor` \(-1.0\)"),
        ({"num_response_tokens": 5}, {"penalty_factor": math.nan}, r"`penalty_factor` \(nan\)"),
    ],
)
def test_settings_of_the_penalty_out_of_range(extra_info: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        overlong.compute_score("", "", "42", extra_info, **{**LENGTHS, **settings})


def test_the_penalty_refuses_a_buffer_without_tokens_and_canaries_without_lengths() -> None:
    with pytest.raises(ValueError, match=r"`reward.overlong_buffer.len` \(0\)"):
        overlong_penalty(5, max_response_length=10, buffer_length=0)
    with pytest.raises(ValueError, match="max_response_length and buffer_length"):
        list(overlong.canaries("compute_score", {}))
