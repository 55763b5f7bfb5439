"""The default verifier against DAPO's own rule and the library math-verify, on generated answers."""

import logging
import re
import warnings
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from dapo.rewards.math import compute_score
from tests.support.rewards import dapo_rule
from tests.support.rewards.number_pairs import number_pairs, parts

THOUSANDS = re.compile(r"(?<![0-9])(?<![0-9],)[0-9]{1,3}(,[0-9]{3})+(?![0-9]|,[0-9])")
COMPARABLE = re.compile(r"[+-]?[0-9][0-9,]*(\.[0-9]+)?|[0-9]+/[0-9]+|[A-Za-z]+|\([A-Z]\)|\\frac\{[0-9]+\}\{[0-9]+\}")
DELIMITERS = re.compile(r"\\[()\[\]]")
# What the library cannot read although nobody disputes it: a box that is not closed, `=` before a number, currency,
# percent, degrees, thousands, text commands, markup and delimiters, units, punctuation at the ends, spaces in numbers.
OPEN_BOX = re.compile(r"\\boxed\{(?=(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*$)")
PLAIN = (
    (r"\{\s*=", "{"),
    (r"x = \((\$?)x = ", r"x = (\1"),
    (r"\\\$|\\?%|\^\\circ", ""),
    (r",\\!\s*|\\[!,;:]|\{,\}|(?<=[0-9]),(?=[0-9]{3})", ""),
    (r"\\(?:text|textnormal)\{([^{}]*)\}", r"\1"),
    (r"\*|\\[()\[\]]|\\left|\\right|about|\$|(?<![A-Za-z])_", ""),
    (r"(?:dollars|cm|miles|hours)(?:\^[23])?", ""),
    (r"[.,;:\s]+(?=[\s}\])]*$|\})", ""),
    (r"(^|\{)[.,;:\s]+", r"\1"),
    (r"(?<=[0-9])\s+(?=[0-9.])", ""),
)
# Of boxes that a sentence parts, the library makes a set; of those the last one is meant.
CORRECTED = re.compile(r"\\boxed\{.*Wait.*(?=\\boxed)", re.DOTALL)


@given(
    number=st.integers(-(10**9), 10**9),
    dress=st.lists(st.sampled_from(parts("ruled dress")), max_size=3),
    gap=st.integers(0, 12),
    thousands=st.booleans(),
)
def test_a_number_in_the_rules_dress(number: int, dress: list[str], gap: int, thousands: bool) -> None:
    text = f"{number:,}" if thousands and number >= 0 else str(number)
    text = text[:gap] + " " + text[gap:] if gap and "," not in text else text
    for decoration in dress:
        text = decoration.format(text)
    assume(dapo_rule.accepts(f"Answer: {text}", str(number)))
    assert compute_score("math_dapo", f"Answer: {text}", str(number))["acc"] is True
    assert compute_score("math_dapo", f"Answer: {text}", str(number + 1))["acc"] is False


def may_be_refused(answer: str) -> bool:
    """Whether an answer may be one of those that are never accepted; rather too often than too seldom."""
    commas = "," in THOUSANDS.sub("0", re.sub(r"[^0-9,]", "", answer))
    formula = answer.replace("\\$", "").count("$") > 1 and bool(re.search(r"\$.*\$", answer, re.DOTALL))
    outside = re.sub(r"\$[^$]*\$", " ", answer.replace("\\$", ""), count=1)
    beside = formula and bool(re.search(r"[0-9\u00b2$+/^-]|\\sqrt", outside.rpartition("=")[2]))
    return commas or beside


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(st.sampled_from(parts("ruled piece")), min_size=1, max_size=8).map("".join))
def test_a_soup_of_what_the_rule_treats(answer: str) -> None:
    solution = f"Answer: {answer}"
    truth = dapo_rule.prediction(solution)
    assume(COMPARABLE.fullmatch(truth) and dapo_rule.accepts(solution, truth) and not may_be_refused(answer))
    assert compute_score("math_dapo", solution, truth)["acc"] is True


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 3_000), *[pytest.param(seed, 10_000, marks=pytest.mark.long) for seed in range(1, 11)]],
)
def test_nothing_is_accepted_that_both_others_refuse(seed: int, count: int) -> None:
    assert not any(refused("Answer: 42", "42", "42", Fraction(42)))
    for answer in ("41 or 42", "42 million", "40 + 3", "\\frac{42}{3}", "(41, 42)", "-42", "42x"):
        assert all(refused(f"\\boxed{{{answer}}}", answer, "42", Fraction(42))), "else it would show no false verdict"
    pairs = list(number_pairs(seed, count))
    accepted = [pair for pair in pairs if compute_score("math_dapo", pair[0], pair[2])["acc"]]
    assert count / 20 < len(accepted) < count / 2
    assert [pair for pair in accepted if all(refused(*pair))] == []


def refused(solution: str, answer: str, truth: str, value: Fraction) -> Iterator[bool]:
    """What DAPO's rule and the library say, of the solution and of its answer as written or in a plainer spelling."""
    texts = (answer, DELIMITERS.sub("$", answer.replace("*", "")), plainer(answer))
    yield value not in map(dapo_rule.value, (solution, *(f"Answer: {text}" for text in texts)))
    yield not accepted_by_the_library(solution, answer, truth, value)


def accepted_by_the_library(solution: str, answer: str, truth: str, value: Fraction) -> bool:
    """The answer in a box of its own, or the boxes of the solution: of a text without any, the library would take the
    last number. It does not compare fractions with decimals exactly."""
    texts = (answer, answer.split("\n")[0], CORRECTED.sub("", answer))
    boxed = [f"\\boxed{{{text}}}" for text in (*texts, *map(plainer, texts))]
    if "\\boxed" in solution:
        boxed += [solution, plainer(solution), plainer(CORRECTED.sub("", solution))]
    truths = (truth, f"{float(value):.12g}")
    return any(equal(text, expected) for expected in truths for text in dict.fromkeys(boxed))


def plainer(text: str) -> str:
    """An answer without what the library cannot read."""
    text = OPEN_BOX.sub("", text)
    for _ in range(3):
        for pattern, kept in PLAIN:
            text = re.sub(pattern, kept, text)
    return text


def equal(text: str, truth: str) -> bool:
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            gold, found = (parse(one, parsing_timeout=None) for one in (f"\\boxed{{{truth}}}", text))
            return bool(verify(gold, found, timeout_seconds=None))
        except Exception:  # what it cannot read raises anything
            return False
