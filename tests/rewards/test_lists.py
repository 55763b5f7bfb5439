"""One answer or several: boxes on a line, hedged answers, and lists however their items are joined."""

import time

import pytest

from dapo.rewards import math, math_verify


@pytest.mark.parametrize("verifier", [math, math_verify])
@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        pytest.param(r"\boxed{41}. Wait, that is wrong: \boxed{42}", "42", id="a-corrected-box"),
        pytest.param(r"Answer: \boxed{41}. Wait, that is wrong: \boxed{42}", "42", id="behind-a-label"),
        pytest.param(r"\boxed{40} or \boxed{41}. No, it must be \boxed{42}.", "42", id="alternatives-corrected"),
        pytest.param(r"\boxed{40+2} = \boxed{42}", "42", id="a-chain"),
        pytest.param(r"\boxed{6} when $n = 1$, so it is $6 \cdot 7 = \boxed{42}$", "42", id="a-step-with-a-case"),
        pytest.param("Answer: 41, so the final answer: 42", "42", id="a-corrected-label"),
        pytest.param(r"\boxed{6} for one, the total is \boxed{42}", "42", id="a-step-with-for"),
        pytest.param(r"\boxed{A}, no, I was wrong: \boxed{B}", "B", id="a-corrected-choice"),
        pytest.param("\\boxed{41} or\n\\boxed{\n42}", "42", id="on-another-line"),
        pytest.param(r"\boxed{1} and \boxed{2}", "1,2", id="two-boxes-for-a-list"),
        pytest.param(r"\boxed{1}, \boxed{2} and $\boxed{3}$", "1,2,3", id="three-boxes-for-a-list"),
        pytest.param(r"So not \boxed{3}. It is \boxed{1}, \boxed{2}.", "1,2", id="a-corrected-list"),
        pytest.param("Answer: 1, 2, and 3", "1,2,3", id="a-comma-before-and"),
        pytest.param("Answer: the roots are $1, 2$", "1 and 2", id="a-list-in-a-sentence"),
        pytest.param(r"Answer: 1 \quad 2", "1,2", id="wide-space"),
        pytest.param(r"Answer: 1,080 \text{ and } 2{,}000", "1080, 2000", id="thousands-in-a-list"),
        pytest.param(r"Answer: (1,2); (3,4)", "(1,2) or (3,4)", id="tuples"),
        pytest.param("Answer: A, B", "A, B", id="choices"),
        pytest.param(r"For $n > 1$ the values are \boxed{1, 2}.", "1,2", id="a-box-in-a-sentence"),
        pytest.param(r"\boxed{32,\! 349}", "32349", id="negative-space-and-space"),
        pytest.param(r"\boxed{125\textnormal{ miles}}", "125", id="textnormal"),
        pytest.param(r"Answer: 1 \times 10^3", "1000", id="scientific"),
        pytest.param(r"\boxed{1.5 \cdot 10^{-2}}", "0.015", id="scientific-with-a-dot"),
        pytest.param("Answer: m and n are coprime, so m+n = 113", "113", id="names-before-a-value"),
        pytest.param(r"Answer: Where $m$ and $n$ are relatively prime, $m+n = \boxed{113}$.", "113", id="formulas"),
        pytest.param("Answer: a, b and c are primes, so a + b + c = 1,080", "1080", id="three-names-before-a-value"),
        pytest.param(r"So it is $\boxed 42$.", "42", id="a-box-without-braces"),
        pytest.param(r"Answer: \(\boxed C\)", "C", id="a-choice-in-a-box-without-braces"),
        pytest.param("Answer: 42", r"\boxed 42", id="a-truth-in-a-box-without-braces"),
        pytest.param("Answer: (5)", "5", id="parentheses"),
        pytest.param(r"Answer: \boxed{34} and thus done", "34", id="a-remark-behind-the-box"),
        pytest.param(r"Answer: $\boxed{34}$, and the other root is rejected.", "34", id="a-remark-with-a-comma"),
        pytest.param(r"Answer: Alice and Bob have \boxed{34} apples", "34", id="names-before-the-box"),
        pytest.param(r"Answer: \boxed{3, 4} and no others", "3,4", id="a-list-and-a-remark"),
        pytest.param(r"\boxed{x = \left(\frac{1}{2}\right)}", "0.5", id="a-fraction-in-parentheses"),
    ],
)
def test_right(verifier: object, solution: str, truth: str) -> None:
    verdict = verifier.compute_score("math", solution, truth)  # type: ignore[attr-defined]
    assert verdict["acc"] is True, verdict["pred"]


@pytest.mark.parametrize("verifier", [math, math_verify])
@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        pytest.param(r"\boxed{42}. Wait, that is wrong: \boxed{41}", "42", id="the-first-box"),
        pytest.param(r"\boxed{41} or \boxed{42}", "42", id="or"),
        pytest.param(r"\boxed{41} or maybe \boxed{42}", "42", id="or-maybe"),
        pytest.param(r"\boxed{41}, or if n is even, \boxed{42}", "42", id="or-with-a-condition"),
        pytest.param(r"\boxed{41} and \boxed{42}", "42", id="and"),
        pytest.param(r"Answer: \boxed{42} and 41", "42", id="and-a-number"),
        pytest.param(r"Answer: \boxed{42} or forty-one", "42", id="or-a-word"),
        pytest.param(r"Answer: \boxed{42} and $\pi$", "42", id="and-a-formula"),
        pytest.param(r"Answer: x and \boxed{y}", "y", id="and-a-letter"),
        pytest.param(r"Answer: \boxed{42}\pi and done", "42", id="half-a-product-and-a-remark"),
        pytest.param(r"Answer: \boxed{3, 4} and no others", "34", id="a-list-with-a-remark-is-no-number"),
        pytest.param(r"\boxed{41}, \boxed{42}", "42", id="comma"),
        pytest.param(r"\boxed{41} cm, \boxed{42} cm", "42", id="units-and-comma"),
        pytest.param(r"\boxed{41} \boxed{42}", "42", id="nothing-between"),
        pytest.param("Answer: m and n are coprime, so m = 41 or 42", "42", id="names-before-or"),
        pytest.param("Answer: m and n are 41 or 42, so m = 42", "42", id="numbers-of-names"),
        pytest.param("Answer: m and n are one or two, so m = 42", "42", id="numbers-of-names-in-words"),
        pytest.param("Answer: m and n are coprime, m = 41, n = 42", "42", id="names-before-two-values"),
        pytest.param("Answer: m and n are coprime, so 41, m = 42", "42", id="names-before-a-list"),
        pytest.param("Answer: a and b are right, so it is = b", "b", id="choices-are-no-names"),
        pytest.param(r"\boxed 41 or \boxed 42", "42", id="or-without-braces"),
        pytest.param(r"\boxed 42 + 1", "42", id="half-a-sum-without-braces"),
        pytest.param(r"\boxed 42\pi", "42", id="half-a-product-without-braces"),
        pytest.param(r"\boxed 42.5", "42", id="half-a-decimal-without-braces"),
        pytest.param(r"\boxed{41} + \boxed{42}", "42", id="a-sum"),
        pytest.param(r"\boxed{41}, but also \boxed{42}", "42", id="but-also"),
        pytest.param(r"It can be \boxed{41} as well as \boxed{42}", "42", id="as-well-as"),
        pytest.param(r"\boxed{41} for $n$ even, \boxed{42} for $n$ odd", "42", id="cases"),
        pytest.param(r"\boxed{41} if n is even, \boxed{42} if n is odd", "42", id="cases-with-a-verb"),
        pytest.param(r"\boxed{41} if $n = 1$; else \boxed{42}", "42", id="if-and-else"),
        pytest.param("Answer: 41 or Answer: 42", "42", id="two-labels-with-or"),
        pytest.param("Answer: 41, Answer: 42", "42", id="two-labels-with-a-comma"),
        pytest.param("Answer: 41 or maybe the answer: 42", "42", id="two-labels-with-or-maybe"),
        pytest.param("Answer: (A) and answer: (B)", "B", id="two-labels-of-choices"),
        pytest.param(r"\boxed{41 or \boxed{42}}", "42", id="a-box-in-a-box"),
        pytest.param("\\boxed{41\n} or \\boxed{42}", "42", id="a-box-over-lines-before"),
        pytest.param(r"\boxed{3,4} or \boxed{1,2}", "1,2", id="lists-in-boxes"),
        pytest.param(r"\boxed{1,2} or \boxed{3,4}", "1,2", id="lists-in-boxes-the-other-way"),
        pytest.param(r"Answer: 3, 4, \boxed{1,2}", "1,2", id="items-before-the-box"),
        pytest.param(r"Answer: \boxed{1,2} or 3, 4", "1,2", id="items-behind-the-box"),
        pytest.param("Answer: z = (1,2); z = (3,4)", "(3,4)", id="tuples-with-names"),
        pytest.param("Answer: (1,2), (3,4)", "(3,4)", id="tuples"),
        pytest.param(r"\boxed{(1,2), (3,4)}", "(3,4)", id="tuples-in-a-box"),
        pytest.param("Answer: C, D or $A, B$", "A, B", id="choices-before-the-formula"),
        pytest.param("Answer: $A, B$ or C, D", "A, B", id="choices-behind-the-formula"),
        pytest.param("Answer: x = (4), x = (5)", "5", id="numbers-in-parentheses"),
        pytest.param("Answer: x = 4, y = (5)", "5", id="the-last-one-in-parentheses"),
        pytest.param("Answer: x = (4), y = ($5$)", "5", id="a-formula-in-parentheses"),
        pytest.param(r"Answer: (6 \quad 7)", "67", id="wide-space-in-parentheses"),
        pytest.param(r"Answer: 4 $2$", "42", id="a-digit-beside-the-formula"),
        pytest.param(r"\boxed{-(\(5\))}", "5", id="a-sign-and-parentheses-outside-the-formula"),
        pytest.param(r"\boxed{$x = 59.5$ million}", "59.5", id="a-scale-behind-the-formula"),
        pytest.param(r"\boxed{3 < x = \frac{2}{4}}", "1/2", id="an-inequality"),
        pytest.param(r"\boxed{1} and \boxed{2}", "12", id="a-list-is-no-number"),
        pytest.param(r"\boxed{1}, \boxed{2}", "(1,2)", id="a-list-is-no-tuple"),
        pytest.param(r"1.5 \times \boxed{10^3}", "1500", id="a-power-alone-in-the-box"),
        pytest.param(r"Answer: 2 \times 5^3", "250", id="another-power"),
        pytest.param(r"Answer: 1 \times 10^{999}", "1" + "0" * 999, id="a-huge-power"),
    ],
)
def test_wrong(verifier: object, solution: str, truth: str) -> None:
    verdict = verifier.compute_score("math", solution, truth)  # type: ignore[attr-defined]
    assert verdict["acc"] is False, verdict["pred"]


@pytest.mark.parametrize(
    ("solution", "truth", "right"),
    [
        pytest.param(r"\boxed{(7,11), (11,7)}", "(11,7) or (7,11)", True, id="tuples-in-any-order"),
        pytest.param(r"\boxed{(7,11)} or \boxed{(11,7)}", "(11,7) or (7,11)", True, id="tuples-in-boxes"),
        pytest.param(r"\boxed{(7,11), (11,8)}", "(11,7) or (7,11)", False, id="another-tuple"),
        pytest.param(r"\boxed{(7,11)}", "(11,7) or (7,11)", False, id="one-tuple"),
        pytest.param(r"\boxed{(7,11), (11,7), (1,2)}", "(11,7) or (7,11)", False, id="one-too-many"),
        pytest.param(r"\boxed{2} and \boxed{1}", "1,2", True, id="boxes-in-any-order"),
        pytest.param(r"\boxed{[-2,7]}", r"-2 \le x \le 7", True, id="an-interval-for-an-inequality"),
        pytest.param(r"\boxed{x \in [-2,7]}", r"-2 \le x \le 7", True, id="membership-for-an-inequality"),
        pytest.param(r"\boxed{x\in\left[-2,7\right]}", r"-2 \le x \le 7", True, id="membership-with-left"),
        pytest.param(r"\boxed{[2,\infty)}", r"x \ge 2", True, id="a-ray"),
        pytest.param(r"\boxed{x \in [-2,7]}", "[-2,7]", True, id="membership-for-an-interval"),
        pytest.param(r"\boxed{(-2,7]}", r"-2 \le x \le 7", False, id="half-open"),
        pytest.param(r"\boxed{(2,\infty)}", r"x \ge 2", False, id="an-open-ray"),
        pytest.param(r"\boxed{y \in [-2,7]}", r"-2 \le x \le 7", False, id="another-letter"),
        pytest.param(r"\boxed{\{-2,7\}}", r"-2 \le x \le 7", False, id="a-set"),
        pytest.param(r"\boxed{[-2,7], [1,2]}", r"-2 \le x \le 7", False, id="two-intervals"),
        pytest.param(r"Answer: \(\frac{1}{\sqrt{2}}\)", r"\frac{\sqrt{2}}{2}", True, id="round-delimiters"),
    ],
)
def test_by_the_library(solution: str, truth: str, right: bool) -> None:
    assert math_verify.compute_score("math", solution, truth)["acc"] is right


def test_words_without_end_are_read_at_once() -> None:
    """A pattern with a choice within a choice would take longer than the universe on these."""
    for text in (
        "\\boxed{1}" + " aa" * 90 + "9",
        "\\boxed{1}" + "a" * 280 + "9",
        "m and n are " + "a" * 280,
        "m and n are " + "a " * 140,
        "m and n are " + "a-" * 140,
    ):
        began = time.process_time()
        assert math.compute_score("math", f"Answer: {text}", "113")["acc"] is False
        assert time.process_time() - began < 1
