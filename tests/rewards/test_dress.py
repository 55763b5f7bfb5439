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
