"""Right answers in a dress that is none of the answer, and what looks like one but says something else."""

import pytest

from dapo.rewards import math, math_verify

BOTH = pytest.mark.parametrize("verifier", [math, math_verify])


@BOTH
@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        pytest.param(r"\textbf{Answer:} 42", "42", id="bold-label"),
        pytest.param(r"$\text{Answer: } 42$", "42", id="label-in-a-formula"),
        pytest.param(r"$$\text{Answer: }\frac{1}{2}$$", "1/2", id="label-before-a-fraction"),
        pytest.param(r"\textbf{Answer: 42}", "42", id="label-and-answer-in-bold"),
        pytest.param(r"$\textbf{Answer: 42}.$", "42", id="label-and-answer-in-a-formula"),
        pytest.param(r"\boxed{Answer: 42}", "42", id="label-in-a-box"),
        pytest.param(r"\boxed{\text{Answer: } \text{(C)}}", "C", id="label-in-a-box-before-a-choice"),
        pytest.param(r"$\boxed{\text{Answer: 42}}$", "42", id="label-and-answer-in-two-commands"),
        pytest.param("\\textbf{Answer:}\n42", "42", id="answer-on-the-next-line"),
        pytest.param(r"{\bf Answer:} $\{1, 2\}$", r"\{1,2\}", id="set"),
    ],
)
def test_a_label_in_braces_is_a_label(verifier: object, solution: str, truth: str) -> None:
    verdict = verifier.compute_score("math", solution, truth)  # type: ignore[attr-defined]
    assert verdict["acc"] is True, verdict["pred"]


@BOTH
@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        pytest.param(r"\textbf{Answer: 4}2", "42", id="brace-inside"),
        pytest.param(r"\sqrt{Answer: 42}^2", "42", id="more-behind-the-brace"),
        pytest.param(r"Answer: \{42\}", "42", id="set"),
        pytest.param(r"\textbf{Answer:} 41 or 42", "42", id="two-guesses"),
        pytest.param(r"\textbf{Answer: 41} \textbf{or 42}", "42", id="two-guesses-in-bold"),
    ],
)
def test_a_brace_behind_a_label_hides_nothing(verifier: object, solution: str, truth: str) -> None:
    verdict = verifier.compute_score("math", solution, truth)  # type: ignore[attr-defined]
    assert verdict["acc"] is False, verdict["pred"]


@BOTH
@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        pytest.param("10^3", "1000", id="power-of-ten"),
        pytest.param("-10^{3}", "-1000", id="negative-power-of-ten"),
        pytest.param("10^{-2}", "0.01", id="small-power-of-ten"),
        pytest.param("1.5\u00d710^3", "1500", id="scientific-with-a-cross"),
        pytest.param("1.5 * 10^{3}", "1500", id="scientific-with-a-star"),
        pytest.param("1.5\u00b710^3", "1500", id="scientific-with-a-dot"),
        pytest.param("1000", "10^3", id="power-of-ten-as-truth"),
        pytest.param(r"{\frac{3}{4}}", r"\frac{3}{4}", id="braces-around-a-fraction"),
        pytest.param(r"\boxed{{\frac{3}{4}}}", "0.75", id="braces-in-a-box"),
        pytest.param("{42}", "42", id="braces-around-a-number"),
        pytest.param(r"{\sqrt{2}}", r"\sqrt{2}", id="braces-around-a-root"),
        pytest.param(r"\frac{1,000}{3}", r"\frac{1000}{3}", id="thousands-in-a-fraction"),
        pytest.param("1,000/3", "1000/3", id="thousands-before-a-slash"),
        pytest.param("-1,234,567/1,000", "-1234.567", id="thousands-in-both-parts"),
        pytest.param("1 1,001/2,000", "1.5005", id="thousands-in-a-mixed-number"),
        *[pytest.param(f"{dash}7", "-7", id=f"minus-{ascii(dash)}") for dash in "\u2010\u2011\u2012\u2013\ufe63\uff0d"],
        pytest.param("x = \u201342", "-42", id="dash-behind-an-equals-sign"),
        pytest.param("$\u20131/2$", "-0.5", id="dash-in-a-formula"),
    ],
)
def test_a_number_is_its_value(verifier: object, answer: str, truth: str) -> None:
    verdict = verifier.compute_score("math", f"Answer: {answer}", truth)  # type: ignore[attr-defined]
    assert verdict["acc"] is True, verdict["pred"]


@BOTH
@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        pytest.param("10^3", "30", id="a-power-is-no-product"),
        pytest.param("10^3", "103", id="a-power-is-no-number"),
        pytest.param("10^{4}", "1000", id="another-power"),
        pytest.param("2*10^{3}", "1000", id="a-multiple"),
        pytest.param("2^3", "8", id="a-power-of-two"),
        pytest.param("110^2", "100", id="a-power-of-another-number"),
        pytest.param("x10^2", "100", id="a-power-behind-a-letter"),
        pytest.param("10^3 or 10^2", "1000", id="two-powers"),
        pytest.param("{42, 43}", "42", id="a-set-without-backslashes"),
        pytest.param("{41}{42}", "42", id="two-groups"),
        pytest.param("{4}2", "42", id="a-group-and-a-digit"),
        pytest.param("{x}^{2}", "x}^{2", id="groups-at-both-ends"),
        pytest.param(r"\frac{1,00}{3}", r"\frac{100}{3}", id="a-comma-that-parts-no-thousands"),
        pytest.param(r"\frac{1,0000}{3}", r"\frac{10000}{3}", id="thousands-of-four-digits"),
        pytest.param(r"\frac{1, 000}{3}", r"\frac{1000}{3}", id="a-list-in-a-fraction"),
        pytest.param("1,2/3", "12/3", id="a-list-before-a-slash"),
        *[pytest.param(f"{dash}7", "7", id=f"minus-{ascii(dash)}") for dash in "\u2010\u2011\u2012\u2013\ufe63\uff0d"],
        pytest.param("41\u201342", "-42", id="a-range"),
        pytest.param("41 \u201342", "-42", id="a-range-with-a-space"),
        pytest.param("x\u20137", "-7", id="a-difference"),
    ],
)
def test_a_number_is_no_other(verifier: object, answer: str, truth: str) -> None:
    verdict = verifier.compute_score("math", f"Answer: {answer}", truth)  # type: ignore[attr-defined]
    assert verdict["acc"] is False, verdict["pred"]


@BOTH
@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("YES", "Yes", True),
        ("no", "NO", True),
        ("True", "TRUE", True),
        ("NO", "Yes", False),
        ("NOT", "not", False),
        ("on", "NO", False),
        ("3:45 p.m.", "3:45 PM", True),
        ("3:45pm", "3:45 P.M.", True),
        (r"3:45 \text{ PM}", "3:45 pm", True),
        ("3:45 am", "3:45 PM", False),
        ("3:45", "3:45 PM", False),
        ("3:46 pm", "3:45 PM", False),
    ],
)
def test_capitals_of_yes_and_no_and_times(verifier: object, answer: str, truth: str, right: bool) -> None:
    assert verifier.compute_score("math", f"Answer: {answer}", truth)["acc"] is right  # type: ignore[attr-defined]
