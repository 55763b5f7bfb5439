"""GSM8K's format: which line counts, which spellings of a number, and what is wrong."""

import pytest

from dapo.rewards.gsm8k import READS_LAST, canaries, compute_score


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        pytest.param("9 * 2 = 18\n#### 18", "18", id="number"),
        pytest.param("#### 18", "She makes 9 * 2 = $<<9*2=18>>18.\n#### 18", id="the-whole-reference-as-truth"),
        pytest.param("#### 1080", "... #### 1,080", id="thousands-in-the-truth"),
        pytest.param("#### 1,080", "1080", id="thousands-in-the-answer"),
        pytest.param("####18", "18", id="no-space"),
        pytest.param("####\n18", "18", id="on-the-next-line"),
        pytest.param("#### $18.00", "18", id="dollars-and-cents"),
        pytest.param("#### **18**", "18", id="bold"),
        pytest.param("#### 18.", "18", id="closing-dot"),
        pytest.param("#### 18 dollars<|im_end|>", "18", id="unit-and-token"),
        pytest.param("#### 1,018 fresh duck eggs.", "1018", id="what-is-counted"),
        pytest.param("#### -5", "#### -5", id="negative"),
        pytest.param("#### 17\n#### 18\nDone.", "18", id="the-last-mark"),
    ],
)
def test_right_answers(solution: str, truth: str) -> None:
    verdict = compute_score("gsm8k", solution, truth)
    assert (verdict["score"], verdict["acc"]) == (1.0, True), verdict["pred"]


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        pytest.param("#### 17", "18", id="another-number"),
        pytest.param("18", "18", id="no-mark"),
        pytest.param("Answer: 18", "18", id="another-label"),
        pytest.param("18\n####", "18", id="nothing-behind-the-mark"),
        pytest.param("#### 9 * 2", "18", id="never-calculated"),
        pytest.param("#### 17 or 18", "18", id="two-guesses"),
        pytest.param("#### 18 or seventeen", "18", id="two-guesses-in-words"),
        pytest.param("#### 18 thousand", "18", id="a-thousand-times-as-much"),
        pytest.param("#### 18 eggs and more", "18", id="not-all-of-it"),
        pytest.param("#### 18 of the eggs she had before", "18", id="a-sentence"),
        pytest.param("#### 3/18 eggs", "18", id="a-fraction"),
        pytest.param("#### 17, 18", "18", id="a-list"),
        pytest.param("#### x", "#### x", id="no-number"),
        pytest.param("#### \u0661\u0668", "18", id="other-digits"),
        pytest.param("####", "####", id="nothing-is-never-right"),
        pytest.param("#### 18" + " " * READS_LAST, "18", id="outside-the-tail"),
    ],
)
def test_wrong_answers(solution: str, truth: str) -> None:
    verdict = compute_score("gsm8k", solution, truth)
    assert (verdict["score"], verdict["acc"]) == (-1.0, False), verdict["pred"]


def test_every_canary_holds() -> None:
    known = list(canaries("compute_score", {}))
    assert [compute_score("", text, truth)["score"] for text, truth, _, _ in known] == [each[3] for each in known]
    assert {each[3] for each in known} == {1.0, -1.0}
