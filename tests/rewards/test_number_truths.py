"""Number truths under random answers: nothing is right that both DAPO's rule and math-verify find wrong."""

import re
from collections.abc import Iterator
from fractions import Fraction

import pytest

from dapo.rewards.math import compute_score
from tests.support.rewards import dapo_rule, symbolic
from tests.support.rewards.number_pairs import number_pairs

DELIMITERS = re.compile(r"\\[()\[\]]")


def accepted_alone(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Yields what this verifier alone accepts, of `count` random pairs."""
    for solution, answer, truth, value in number_pairs(seed, count):
        if not compute_score("math_dapo", solution, truth)["acc"]:
            continue
        given = (solution, f"Answer: {answer}", "Answer: " + DELIMITERS.sub("$", answer.replace("*", "")))
        plain = f"Answer: {symbolic.plainer(answer)}"
        if value not in map(dapo_rule.value, (*given, plain)) and not symbolic.accepts(solution, answer, truth, value):
            yield solution, truth


def test_nothing_is_accepted_alone() -> None:
    assert list(accepted_alone(0, 3_000)) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
def test_nothing_of_100_000_pairs_is_accepted_alone(seed: int) -> None:
    assert list(accepted_alone(seed, 10_000)) == []


def test_the_pairs_have_right_and_wrong_answers_of_all_kinds() -> None:
    pairs = list(number_pairs(0, 3_000))
    right = [pair for pair in pairs if compute_score("math_dapo", pair[0], pair[2])["acc"]]
    assert len(pairs) / 20 < len(right) < len(pairs) / 2
    for part in ("\\boxed", "Answer:", "Wait", "times 10", " or ", "frac", "("):
        assert any(part in solution for solution, *_ in right) and any(part in solution for solution, *_ in pairs), part


@pytest.mark.parametrize("answer", ["41 or 42", "42 million", "40 + 3", "\\frac{42}{3}", "(41, 42)", "-42", "42x"])
def test_both_others_can_refuse(answer: str) -> None:
    """Otherwise they could not show a false verdict."""
    solution, plain = f"Answer: {answer}", f"Answer: {symbolic.plainer(answer)}"
    assert 42 not in (dapo_rule.value(solution), dapo_rule.value(plain))
    assert not symbolic.accepts(f"\\boxed{{{answer}}}", answer, "42", Fraction(42))
