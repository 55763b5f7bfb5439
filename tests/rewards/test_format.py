"""The layout of think and answer tags: what keeps to it, the counts, and bad names."""

from typing import Any

import pytest

from dapo.rewards.format import canaries, compute_score

GOOD = "<think>2 + 2</think>\n<answer>4</answer>"


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
        pytest.param("<think>2<answer>4</answer></think>", {}, 0.0, id="nested"),
        pytest.param(GOOD + GOOD, {}, 0.0, id="twice"),
        pytest.param("<think><think>2</think><answer>4</answer>", {}, 0.0, id="a-tag-twice"),
        pytest.param("So: " + GOOD, {}, 0.0, id="text-before"),
        pytest.param("<think>2</think> so <answer>4</answer>", {}, 0.0, id="text-between"),
        pytest.param(GOOD + ".", {}, 0.0, id="text-behind"),
        pytest.param("<think> </think><answer>4</answer>", {}, 0.0, id="no-thought"),
        pytest.param("<think>2</think><answer>\n</answer>", {}, 0.0, id="no-answer"),
        pytest.param("<THINK>2</THINK><answer>4</answer>", {}, 0.0, id="upper-case"),
        pytest.param("", {}, 0.0, id="empty"),
    ],
)
def test_scores(text: str, settings: dict[str, Any], score: float) -> None:
    assert compute_score("", text, "4", {}, **settings)["score"] == score


def test_the_counts_are_metrics_and_the_verdict_is_left_to_others() -> None:
    text = "<think></think></think><answer>" * 2
    assert compute_score("", text, "4") == {
        "score": 0.0,
        "think_open": 2.0,
        "think_close": 4.0,
        "answer_open": 2.0,
        "answer_close": 0.0,
    }


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        pytest.param({"think": "<think>"}, r"`think` \('<think>'\)", id="brackets"),
        pytest.param({"answer": ""}, r"`answer` \(''\)", id="empty"),
        pytest.param({"think": "answer"}, r"`answer` \('answer'\) must differ", id="the-same-name"),
    ],
)
def test_bad_names(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        compute_score("", GOOD, "4", {}, **settings)


@pytest.mark.parametrize("settings", [{}, {"think": "r", "answer": "o"}, {"opened": True}], ids=str)
def test_every_canary_holds(settings: dict[str, Any]) -> None:
    known = list(canaries("compute_score", settings))
    scores = [compute_score("", text, truth, {}, **settings)["score"] for text, truth, _, _ in known]
    assert scores == [each[3] for each in known] and set(scores) == {1.0, 0.0}
