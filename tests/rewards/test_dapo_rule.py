"""The default verifier against DAPO's own rule: it accepts all that the rule does, but for what it may never accept."""

import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dapo.rewards.math import compute_score
from tests.support.rewards import dapo_rule

THOUSANDS = re.compile(r"(?<![0-9])(?<![0-9],)[0-9]{1,3}(,[0-9]{3})+(?![0-9]|,[0-9])")


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        pytest.param("Answer: 204", "204", id="integer"),
        pytest.param("Answer: 1\nanswer :  2", "2", id="the-last-label"),
        pytest.param("Answer: 2\nAnswer:", "2", id="an-empty-label-behind"),
        pytest.param("Answer:\n\n\t 2 \r", "2", id="on-a-later-line"),
        pytest.param("Answer: 1 080", "1080", id="spaces"),
        pytest.param(r"Answer: 1\ 080\;", "1080", id="latex-spaces"),
        pytest.param("Answer: 1,080,", "1080", id="a-comma-behind"),
        pytest.param("Answer: 1080", "1,080", id="thousands-in-the-truth"),
        pytest.param(r"Answer: 10{,}800", "10800", id="braces"),
        pytest.param(r"Answer: 10,\!800", "10800", id="negative-space"),
        pytest.param(r"Answer: \$18", "18", id="currency"),
        pytest.param("Answer: $18.$", "18", id="dot-in-the-formula"),
        pytest.param("Answer: it is $18$ indeed.", "18", id="formula-in-a-sentence"),
        pytest.param("Answer: $5$ cm^2", "5", id="a-formula-with-its-unit"),
        pytest.param("Answer: 4 hours 2 minutes", "42", id="units-between-digits"),
        pytest.param("Answer: 60 square feet", "60", id="two-units"),
        pytest.param(r"Answer: 5\text{m}", "5", id="metres"),
        pytest.param(r"Answer: 5 \mbox{ cm}", "5", id="mbox"),
        pytest.param(r"Answer: 7^\mathrm{th}", "7^", id="ordinal"),
        pytest.param(r"Answer: 30^\circ", "30", id="degrees"),
        pytest.param(r"Answer: \boxed{42}", "42", id="box"),
        pytest.param(r"Answer: 4\boxed{2}", "42", id="a-digit-before-the-box"),
        pytest.param(r"Answer: \boxed{7} = 42", "42", id="right-of-a-box"),
        pytest.param(r"Answer: \textbf{\boxed{42}}", "42", id="box-in-bold"),
        pytest.param(r"Answer: x + y = 42", "42", id="equation"),
        pytest.param("Answer: x <= 42", "42", id="inequality"),
        pytest.param("Answer: a 42", "42", id="article"),
        pytest.param('Answer: "42"', "42", id="quotation-marks"),
        pytest.param(r"Answer: \overline{42}", "42", id="overline"),
        pytest.param(r"Answer: \frac12", r"\frac{1}{2}", id="short-fraction"),
        pytest.param(r"Answer: 2\sqrt3", r"2\sqrt{3}", id="short-root"),
        pytest.param("Answer: 1 1/2", "11/2", id="a-space-in-a-fraction"),
        pytest.param(r"Answer: \text{(C)}", "(C)", id="choice"),
        pytest.param("Answer: no solution", "no solution", id="words"),
    ],
)
def test_what_the_rule_accepts_is_right(solution: str, truth: str) -> None:
    assert dapo_rule.accepts(solution, truth), dapo_rule.prediction(solution)
    assert compute_score("math_dapo", solution, truth)["acc"] is True


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        pytest.param("x = 41 or x = 42", "42", id="or"),
        pytest.param("$41$ and $42$", "41", id="and"),
        pytest.param("x = 41, y = 42", "42", id="commas"),
        pytest.param("4,2", "42", id="digits-with-commas"),
        pytest.param("$41$, $42$", "41", id="formulas-with-commas"),
        pytest.param("$41$ $42$", "41", id="formulas"),
        pytest.param("$41$ 42", "41", id="a-number-beside-the-formula"),
        pytest.param("$1$+1", "1", id="half-a-calculation"),
        pytest.param("-$42$", "42", id="a-sign-outside-the-formula"),
        pytest.param("\u0664\u0662", "\u0664\u0662", id="other-digits"),
        pytest.param("[INVALID]", "[INVALID]", id="sentinel"),
        pytest.param("None", "None", id="none"),
        pytest.param("dollars", "cents", id="nothing-left"),
    ],
)
def test_what_the_rule_accepts_and_this_verifier_never_does(answer: str, truth: str) -> None:
    assert dapo_rule.accepts(f"Answer: {answer}", truth)
    assert compute_score("math_dapo", f"Answer: {answer}", truth)["acc"] is False


DECORATIONS = [
    *(
        "{}",
        " {} ",
        "${}$",
        "$ {} $",
        "\\boxed{{{}}}",
        "$\\boxed{{{}}}$",
        "\\text{{{}}}",
        "\\textbf{{{}}}",
        "{} dollars",
    ),
    *("{} cm", "{}\\text{{ cm}}", "{}^\\circ", "x = {}", "n = 2 + 3 = {}", "$x = {}$", "\\${}", "a {}", "{}\\;"),
    *("the result is ${}$ here", "${}$.", "\\mbox{{{} units}}", '"{}"', "{} square inches", "\\ldots {}", "{}{{,}}"),
]


@settings(deadline=None, max_examples=300)
@given(
    st.integers(-(10**9), 10**9), st.lists(st.sampled_from(DECORATIONS), max_size=3), st.integers(0, 12), st.booleans()
)
def test_a_number_in_the_rules_dress(number: int, dress: list[str], gap: int, thousands: bool) -> None:
    text = f"{number:,}" if thousands and number >= 0 else str(number)
    text = text[:gap] + " " + text[gap:] if gap and "," not in text else text
    for decoration in dress:
        text = decoration.format(text)
    assume(dapo_rule.accepts(f"Answer: {text}", str(number)))
    assert compute_score("math_dapo", f"Answer: {text}", str(number))["acc"] is True
    assert compute_score("math_dapo", f"Answer: {text}", str(number + 1))["acc"] is False


PIECES = [
    *("42", "4", "2", "7", "0", "180", " ", " ", "$", "$", "\\$", "\\boxed{", "\\text{", "}", "}", "{", "=", "x", "y"),
    *("cm", "hours", "square", "a ", "an ", ".", "1,080", "\\!", "^\\circ", "-", "+", "/", "\\;"),
    *("\\ ", "\\frac", "\\frac{1}{2}", "\\sqrt", "(", ")", "\\textbf{", "\\overline{", "%", "**", "<|im_end|>", "\t"),
    *("\\mathrm{th}", "the ", "is ", "\r", "\\(", "\\)", "^2", "\u00bd", "\u00b2", "\\dots", '"', "\n", "\u2028"),
]
COMPARABLE = re.compile(r"[+-]?[0-9][0-9,]*(\.[0-9]+)?|[0-9]+/[0-9]+|[A-Za-z]+|\([A-Z]\)|\\frac\{[0-9]+\}\{[0-9]+\}")


def may_be_refused(answer: str) -> bool:
    """Whether an answer may be one of those that are never accepted; rather too often than too seldom."""
    commas = "," in THOUSANDS.sub("0", re.sub(r"[^0-9,]", "", answer))
    formula = answer.replace("\\$", "").count("$") > 1 and bool(re.search(r"\$.*\$", answer, re.DOTALL))
    outside = re.sub(r"\$[^$]*\$", " ", answer.replace("\\$", ""), count=1)
    beside = formula and bool(re.search(r"[0-9\u00b2$+/^-]|\\sqrt", outside.rpartition("=")[2]))
    return commas or beside


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join))
def test_a_soup_of_what_the_rule_treats(answer: str) -> None:
    solution = f"Answer: {answer}"
    truth = dapo_rule.prediction(solution)
    assume(COMPARABLE.fullmatch(truth) and dapo_rule.accepts(solution, truth) and not may_be_refused(answer))
    assert compute_score("math_dapo", solution, truth)["acc"] is True
