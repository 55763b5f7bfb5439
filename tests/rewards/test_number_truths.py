"""The default verifier against DAPO's own rule and the library math-verify, on generated answers."""

import logging
import re
import warnings
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from dapo.rewards import gsm8k, math, math_verify
from dapo.rewards.math import compute_score
from tests.support.rewards import dapo_rule
from tests.support.rewards.number_pairs import number_pairs, parts

THOUSANDS = re.compile(r"(?<![0-9])(?<![0-9],)[0-9]{1,3}(,[0-9]{3})+(?![0-9]|,[0-9])")
COMPARABLE = re.compile(r"[+-]?[0-9][0-9,]*(\.[0-9]+)?|[0-9]+/[0-9]+|[A-Za-z]+|\([A-Z]\)|\\frac\{[0-9]+\}\{[0-9]+\}")
DELIMITERS = re.compile(r"\\[()\[\]]")
# Usual spellings that neither of the others reads: a choice before its text, a decimal that is about, one value said
# twice, Unicode, and sentences around.
USUAL = (
    (r"(?<=[0-9}])(?:[,.*%\s]|\^\\circ|cm|dollars|hours|miles)*(?:≈|\\approx) ?-?[0-9.,]+", ""),
    (r"\((?:\\?\$)?[A-J]\)\s|It is\s|(?:approximately|≈|x[^0-9]{0,9}\\approx|\\approx)\s*", ""),
    (r"(-?[0-9.,/]+) or \1\.0(?![0-9])", r"\1"),
    (r"\s*I hope it is correct\W*$|。|(?<=\}), where \$a = [^$]*\$$", ""),
    (r"(?<=cm|rs|m\}|s\})²", "^2"),
    (r"10²", "10^2"),
    (r"×", r"\\times "),
    (r"(?<=[0-9])½", r"\\frac{1}{2}"),
    (r"½ or 1/2", "1/2"),
    (r"\$!$", "$"),
    (r"，", ", "),
)
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


@pytest.mark.parametrize("usual", [False, True], ids=["", "usual"])
@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 3_000), *[pytest.param(seed, 10_000, marks=pytest.mark.long) for seed in range(1, 11)]],
)
def test_nothing_is_accepted_that_both_others_refuse(seed: int, count: int, usual: bool) -> None:
    assert not any(refused("Answer: 42", "42", "42", Fraction(42)))
    for answer in ("41 or 42", "42 million", "40 + 3", "\\frac{42}{3}", "(41, 42)", "-42", "42x"):
        assert all(refused(f"\\boxed{{{answer}}}", answer, "42", Fraction(42))), "else it would show no false verdict"
    pairs = list(number_pairs(seed, count, usual=usual))
    accepted = [pair for pair in pairs if compute_score("math_dapo", pair[0], pair[2])["acc"]]
    assert count / 20 < len(accepted) < count / 2
    assert [pair for pair in accepted if all(refused(*pair))] == []


# Of an equation its right side is a number too, by DAPO's rule: m+n = 113 is right for 113. As truths they are in
# verdicts.tsv.
TRUTHS = (
    *(("34", "35"), ("-5", "5"), ("1/2", "0.6"), ("1/2", "1/3"), ("2 hours", "2 minutes"), ("5 cm", "5 cm^2")),
    *(("x+2y=0", "x-2y=0"), ("x >= 2", "x > 2"), ("A,C", "A,B"), ("C", "D")),
    *((r"4\pi", "4"), (r"\sqrt{2}", "2"), (r"\sqrt{2}", "1.41"), ("x^2", "2"), ("7:32", "32:7"), ("2, 3", "3, 4")),
    *((r"\frac{\sqrt{2}}{2}", "0.7"), ("1.5", "11/2"), (r"\mathbb{R}", r"\mathbb{Z}"), ("10^2", "102"), ("n!", "n")),
)
JOINTS = (
    *("{0} or {1}", "{0} (or {1})", "{0} (i.e. {1})", "{0} (={1})", "{0}, {1}", "{0}; {1}", "{0}、{1}", "{0}，{1}"),
    *("{0} ≈ {1}", r"{0} \approx {1}", "{0} or approximately {1}", "{0} (about {1})", "{0} = {1}", "{0} ≠ {1}"),
    *("(C) {0} (D) {1}", "(C) {0}, {1}", "C. {0} or {1}", "{0}. I hope it is {1}", "It is {0}. It is {1}", "{0} {1}"),
    *("It is {0}, not {1}", "There are {0} or {1}", "{0} ∎ {1}", "{0}。{1}", r"\boxed{{{0}}}, where {1}", "{0}²{1}"),
    *(
        r"\boxed{{{0}}} since {1}",
        r"{0} \text{{ or }} {1}",
        "√{0} {1}",
        "{0}½{1}",
        "{0} × {1}",
        "{0} ≤ {1}",
        "({0}) {1}",
    ),
    *(
        "{0}\nAnswer：{1}",
        "{0} and {1}",
        "**{0}** **{1}**",
        "${0}$ or ${1}$",
        "${0}$ (${1}$)",
        "（{0}，{1}）",
        "{0}:{1}",
    ),
)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(math, id="math"),
        pytest.param(math_verify, id="math_verify", marks=pytest.mark.nightly),
        pytest.param(gsm8k, id="gsm8k"),
    ],
)
def test_no_answer_is_right_for_two_truths(module: Any) -> None:
    frames = ("Answer: {}", "Answer：${}$", "**Answer**\n{}", r"\boxed{{{}}}", "#### {}")
    right = 0
    for pair, joint, frame in product(TRUTHS, JOINTS, frames):
        for one, other in (pair, pair[::-1]):
            answer = frame.format(joint.format(one, other))
            verdicts = [module.compute_score("", answer, truth)["acc"] for truth in pair]
            right += any(verdicts)
            assert not all(verdicts), (answer, pair)
    assert right > 50, "else it would show nothing"


def refused(solution: str, answer: str, truth: str, value: Fraction) -> Iterator[bool]:
    """What DAPO's rule and the library say, of the solution and of its answer as written or in a plainer spelling."""
    for pattern, kept in USUAL:
        answer, solution = re.sub(pattern, kept, answer), re.sub(pattern, kept, solution)
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
