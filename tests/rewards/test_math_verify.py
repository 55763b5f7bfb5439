"""The verifier for symbolic answers: what it adds to the rule, what its filter keeps out, and what it never accepts."""

import logging

import pytest

from dapo.rewards import math_verify as verifier
from dapo.rewards.math_verify import READS_LAST, canaries, compute_score
from dapo.rewards.reading.latex_filter import MAX_CHARS, is_tame


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        pytest.param("1,080.", "1080", id="a-number-by-the-rule"),
        pytest.param(r"\frac{1}{2}", "0.5", id="a-fraction-by-the-rule"),
        pytest.param(r"\text{even}", "even", id="a-word-by-the-rule"),
        pytest.param(r"$\frac{1}{\sqrt{2}}$", r"\frac{\sqrt{2}}{2}", id="rationalised"),
        pytest.param("x^2 + 2x + 1", "(x+1)^2", id="expanded"),
        pytest.param(r"2\sin x\cos x", r"\sin(2x)", id="trigonometry"),
        pytest.param(r"\frac{\ln 3}{\ln 2}", r"\log_2 3", id="logarithms"),
        pytest.param(r"\sqrt{50}", r"5\sqrt{2}\text{ cm}", id="unit-in-the-truth"),
        pytest.param("2i + 3", "3+2i", id="complex"),
        pytest.param("2x - y + 1 = 0", "y = 2x+1", id="a-line-in-another-form"),
        pytest.param("2x+1 = y", "y = 2x+1", id="a-line-turned"),
        pytest.param("y - 1 = 2x", "y = 2x+1", id="a-line-rearranged"),
        pytest.param("Hence, $y = 1+2x$", "y = 2x+1", id="a-line-in-a-sentence"),
        pytest.param("Hence, y = 2x+1", "y = 2x+1", id="a-line-in-a-sentence-without-dollars"),
        pytest.param(r"f(x) = x(x+2) = x^2+2x", "y = x^2+2x", id="a-chain-behind-a-name"),
        pytest.param(r"y = 2x + 3x = 5x", "y = 5x", id="a-chain"),
        *[
            pytest.param(rf"\sqrt{{8}}\text{{ {unit}}}", r"2\sqrt{2}", id=f"unit-{unit}")
            for unit in ("m", "cm", "g", "s", "m/s", "ft", "mi", "square units", "m}^{2")
        ],
        pytest.param(r"2\pi \, \mathrm{m}^3", r"\pi \cdot 2", id="cubic-metres"),
        pytest.param(r"2 \cdot g", "g+g", id="a-letter-of-a-unit"),
        pytest.param(r"\sqrt{8}\text{ s}", r"2\sqrt{2}\text{ s}", id="unit-in-both"),
        pytest.param("a^2 + 2aA + A^2", "(A+a)^2", id="a-letter-in-both-sizes"),
        pytest.param("2RT/V", r"\frac{2RT}{V}", id="capitals"),
        pytest.param(r"x = 1+\sqrt{2}", r"\sqrt{2}+1", id="a-name-before-the-value"),
        pytest.param("1+2x", "y = 2x+1", id="a-name-before-the-truth"),
        pytest.param(r"f(x) = x \cdot x", "x^2", id="a-function"),
        pytest.param(r"\{2,1\}", r"\{1,2\}", id="sets-in-any-order"),
        pytest.param("2, 1", "1, 2", id="lists-in-any-order"),
        pytest.param("x = 2 or x = 1", "1, 2", id="a-list-with-or"),
        pytest.param("2, -2", r"\pm 2", id="both-signs"),
        pytest.param("y = 2, x = 1", "x=1, y=2", id="named-values-in-any-order"),
        pytest.param(r"\left( 3, \frac{2\pi}{4} \right)", r"(3,\frac{\pi}{2})", id="pair"),
        pytest.param(r"(-\infty, 2) \cup (6/2, \infty)", r"(-\infty,2)\cup(3,\infty)", id="union-of-intervals"),
        pytest.param(r"2 \leq x", r"x \geq 2", id="inequality-turned"),
        pytest.param("x^2 = 4 - y^2", "x^2+y^2=4", id="equation-rearranged"),
        pytest.param("1010_{2}", "1010_2", id="a-number-of-another-base"),
        pytest.param("1010", "1010_2", id="its-base-in-the-problem"),
        pytest.param(r"\varnothing", r"\emptyset", id="no-solution"),
        pytest.param(
            r"\begin{pmatrix} 2/2 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", id="matrix"
        ),
    ],
)
def test_right_answers(answer: str, truth: str) -> None:
    verdict = compute_score("math", f"Some steps.\nAnswer: {answer}", truth)
    assert (verdict["score"], verdict["acc"]) == (1.0, True), verdict["pred"]


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        pytest.param(r"\sqrt{3}", r"\sqrt{2}", id="another-root"),
        pytest.param("x^2", "x^3", id="another-power"),
        pytest.param("1+1", "2", id="never-calculated"),
        pytest.param(r"\sqrt{4}", "2", id="a-root-of-a-square"),
        pytest.param(r"2^{3}", "8", id="a-power"),
        pytest.param("1.5/3", "1/2", id="a-division"),
        pytest.param(r"\sqrt{2}, \sqrt{3}", r"\sqrt{2}", id="two-answers"),
        pytest.param(r"\sqrt{3} or \sqrt{2}", r"\sqrt{2}", id="two-answers-with-or"),
        pytest.param(r"\{\sqrt{2}, \sqrt{3}\}", r"\sqrt{2}", id="a-set-for-one-answer"),
        pytest.param(r"\pm\sqrt{2}", r"\sqrt{2}", id="both-signs-for-one-answer"),
        pytest.param(r"\sqrt{2}", r"\sqrt{2}, -\sqrt{2}", id="one-answer-of-two"),
        pytest.param("1, 2, 3", "1, 2", id="one-too-many"),
        pytest.param("x=2, y=1", "x=1, y=2", id="named-values-exchanged"),
        pytest.param("4", "x^2+y^2=4", id="one-side-of-an-equation"),
        pytest.param("2x = 4", "x^2+y^2=4", id="another-equation-with-that-side"),
        pytest.param("2", r"x \geq 2", id="a-number-for-an-inequality"),
        pytest.param("2", "x <= 2", id="a-number-for-an-inequality-in-ascii"),
        pytest.param("(1, 2)", "[1,2]", id="open-for-closed"),
        pytest.param("(2, 1)", "(1,2)", id="pair-exchanged"),
        pytest.param("neve", r"\text{even}", id="letters-in-another-order"),
        pytest.param("1010_3", "1010_2", id="another-base"),
        pytest.param("42_{10}", "42_{5}", id="another-base-in-braces"),
        pytest.param("11_2, 21_{3}", "11_2, 21_{7}", id="another-base-in-a-list"),
        pytest.param("0.0", r"(\frac{1}{6})^{10}", id="zero-for-a-small-number"),
        pytest.param("0.0+0", r"2^{-30}", id="a-sum-of-zeros-for-a-small-number"),
        pytest.param("(0.0, 1)", r"(2^{-30}, 1)", id="zero-in-a-pair"),
        pytest.param(r"\{0.0, 1\}", r"\{2^{-30}, 1\}", id="zero-in-a-set"),
        pytest.param("CBA", "ABC", id="an-order-of-points"),
        pytest.param("2y = 2x+1", "y = 2x+1", id="another-line-with-that-side"),
        pytest.param(r"\frac{1}{2} x = y^2", "x = y^2", id="another-parabola-with-that-side"),
        pytest.param("2x - y = 1", "y = 2x+1", id="another-line"),
        pytest.param("0 = 0", "y = 2x+1", id="an-equation-that-always-holds"),
        pytest.param("P(1+r)", "P(1+r)^T", id="a-truth-without-its-exponent-T"),
        pytest.param("2x^{T}", "2x", id="an-exponent-T"),
        *[pytest.param(rf"\pi r^2 {name}", r"\pi r^2", id=f"a-factor-{name}") for name in "cdghlmost"],
        *[pytest.param("5", f"5{name}", id=f"a-truth-without-its-factor-{name}") for name in "cdghlmost"],
        pytest.param("2h", "2d", id="another-factor"),
        pytest.param("3x+2", "3x+2m", id="half-a-term"),
        pytest.param(r"\sqrt{2} \text{ if}", r"\sqrt{2}", id="a-condition"),
        pytest.param(r"2\pi \text{ h}", r"\pi \cdot 2 h", id="a-unit-for-a-factor"),
        pytest.param(r"\pi R^2", r"\pi r^2", id="a-capital-for-a-small-letter"),
        pytest.param("x + X", "2x", id="a-capital-and-a-small-letter"),
        pytest.param("c", "C", id="a-small-letter-for-a-choice"),
        pytest.param("i", "I", id="the-imaginary-unit-for-a-letter"),
        pytest.param(r"\delta x", r"\Delta x", id="a-small-greek-letter"),
        pytest.param("abc", "2ABC", id="small-letters-for-capitals"),
        pytest.param("\u0664x", "4x", id="other-digits"),
        pytest.param("[INVALID]", "[INVALID]", id="sentinel"),
        pytest.param("", "x^2", id="empty"),
    ],
)
def test_wrong_answers(answer: str, truth: str) -> None:
    verdict = compute_score("math", f"Some steps.\nAnswer: {answer}", truth)
    assert (verdict["score"], verdict["acc"]) == (-1.0, False), verdict["pred"]


@pytest.mark.parametrize(
    "latex",
    [
        pytest.param("1E+999999999", id="scientific"),
        pytest.param("2 e 99999999", id="scientific-with-spaces"),
        pytest.param("9^{9^{9}}", id="power-tower"),
        pytest.param("9^9^9", id="power-tower-without-braces"),
        pytest.param("{9^9}^9", id="power-tower-in-a-group"),
        pytest.param("9**9**9**9", id="power-tower-of-python"),
        pytest.param("9^{99999}", id="huge-exponent"),
        pytest.param("12345^{1000}", id="huge-power-of-a-large-number"),
        pytest.param("x^{101}", id="huge-exponent-of-a-variable"),
        pytest.param("(x+1)^{21}", id="huge-exponent-of-a-sum"),
        pytest.param(r"\sqrt{2}^{-21}", id="huge-negative-exponent"),
        pytest.param(r"9^{99 \cdot 99}", id="huge-product-in-an-exponent"),
        pytest.param("9^{9 9 9 9}", id="spaces-in-an-exponent"),
        pytest.param("((2^{900}+1)^{20}+1)^{20}", id="powers-of-sums-of-powers"),
        pytest.param("100000000!", id="factorial"),
        pytest.param(r"\binom{1000000}{500000}", id="binomial"),
        pytest.param(r"\sum_{i=1}^{9} i", id="sum"),
        pytest.param(r"\int x dx", id="integral"),
        pytest.param(r"\operatorname{eye}(30000)", id="huge-matrix"),
        pytest.param("1234567890123456", id="sixteen-digits"),
        pytest.param("(" * 7 + "x" + ")" * 7, id="depth"),
        pytest.param("{[(" * 3 + "x" + ")]}" * 3, id="depth-of-mixed-brackets"),
        pytest.param("((x)", id="not-closed"),
        pytest.param(")x(", id="closed-before-opened"),
        pytest.param("|" * 6 + "x", id="bars"),
        pytest.param("x+" * 100 + "x", id="length"),
        pytest.param(",".join("1" * 30), id="a-long-list"),
        pytest.param(r"\sqrt{x}" * 9, id="many-roots"),
        pytest.param("a+b+c+d+f+g+h", id="many-variables"),
        pytest.param("__import__('os')", id="python"),
        pytest.param("eval(x)", id="a-word"),
        pytest.param(r"\input{x}", id="latex-that-reads-files"),
        pytest.param(r"\begin{verbatim}x\end{verbatim}", id="another-environment"),
        pytest.param("1 & 2", id="columns-without-a-matrix"),
        pytest.param("x\ny", id="line-break"),
        pytest.param("$x$", id="dollars"),
        pytest.param("\u03c0", id="letters-beyond-ascii"),
        pytest.param("x\x00", id="null-byte"),
        pytest.param("", id="empty"),
    ],
)
def test_what_the_filter_keeps_out(latex: str) -> None:
    assert not is_tame(latex)


@pytest.mark.parametrize("latex", ["9^{9^{9}}", "100000000!", "(" * 60 + "x" + ")" * 60, "eval(x)", "x" * 201])
def test_the_library_sees_only_what_the_filter_lets_through(latex: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "_parse", lambda latex: pytest.fail("the library was asked"))
    assert compute_score("math", f"Answer: {latex}", r"\sqrt{2}")["acc"] is False


@pytest.mark.parametrize(
    "latex",
    [
        pytest.param("2^{1000}", id="a-power-of-a-contest"),
        pytest.param("x^{100}-1", id="a-polynomial"),
        pytest.param("x^8+7x^7-6x^6+5x^5-4x^4+3x^3-2x^2", id="a-polynomial-of-many-terms"),
        pytest.param(r"x^{\frac{1}{2}}", id="a-root-as-a-power"),
        pytest.param("x_1^2", id="indexed"),
        pytest.param(r"90^\circ", id="degrees"),
        pytest.param("e^{2x}", id="exponential"),
        pytest.param(r"\left[-\frac{1}{2}, \infty\right)", id="half-open-interval"),
        pytest.param(r"\frac{-b+\sqrt{b^2-4ac}}{2a}", id="formula"),
        pytest.param("123456789012345", id="fifteen-digits"),
        pytest.param("(" * 6 + "x" + ")" * 6, id="depth"),
        pytest.param("x" + "+x" * 99, id="length"),
    ],
)
def test_what_the_filter_lets_through(latex: str) -> None:
    assert len(latex) <= MAX_CHARS and is_tame(latex)


def test_every_canary_holds_and_one_needs_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    known = list(canaries("compute_score", {}))
    assert [compute_score("", text, truth)["score"] for text, truth, _, _ in known] == [each[3] for each in known]
    assert {each[3] for each in known} == {1.0, -1.0}
    monkeypatch.setattr(verifier, "verify", lambda *arguments, **options: False)  # a library that swallows its errors
    assert [compute_score("", text, truth)["score"] for text, truth, _, _ in known] != [each[3] for each in known]


def test_only_the_tail_is_read_and_the_library_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    text = "x" * 1000 + "\nAnswer: $\\sqrt{8}$"
    with caplog.at_level(logging.DEBUG):
        whole = compute_score("math", text, r"2\sqrt{2}")
        assert compute_score("math", text[-READS_LAST:], r"2\sqrt{2}") == whole
    assert whole["acc"] is True
    assert caplog.records == []


def test_an_error_of_the_library_is_wrong_but_its_lack_of_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: type[BaseException]) -> None:
        def fail(*arguments: object, **options: object) -> bool:
            raise error

        monkeypatch.setattr(verifier, "verify", fail)

    for error in (TypeError, RecursionError, NotImplementedError):
        raising(error)
        assert compute_score("math", r"Answer: $\sqrt{8}$", r"2\sqrt{2}")["acc"] is False
    raising(MemoryError)
    with pytest.raises(MemoryError):
        compute_score("math", r"Answer: $\sqrt{8}$", r"2\sqrt{2}")


def test_an_expression_that_failed_once_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    readable = verifier.parse
    monkeypatch.setattr(verifier, "parse", lambda *arguments, **options: [])
    assert compute_score("math", r"Answer: $\sqrt{98}$", r"7\sqrt{2}")["acc"] is False
    monkeypatch.setattr(verifier, "parse", readable)
    assert compute_score("math", r"Answer: $\sqrt{98}$", r"7\sqrt{2}")["acc"] is True


UNION = r"(-\infty,1)\cup[2,\infty)"


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("x > 2", r"(2,\infty)", True),
        (r"$y \leq \frac{1}{2}$", r"\left(-\infty, \frac{1}{2}\right]", True),
        ("2 < x", r"(2,\infty)", True),
        (r"1 < x \le 2", "(1,2]", True),
        (r"2 \ge x > 1", "(1,2]", True),
        ("-1 \u2264 x \u2264 1", "[-1,1]", True),
        ("x < 1 or x >= 2", UNION, True),
        (r"x \ge 2 \text{ or } x < 1", UNION, True),
        (r"[2,\infty) \cup (-\infty,1)", UNION, True),
        (r"x \in [2,\infty) \cup (-\infty,1)", UNION, True),
        (UNION, "x < 1 or x >= 2", True),
        (rf"x \in {UNION}", r"x \ge 2 \text{ or } x < 1", True),
        ("x >= 2", r"(2,\infty)", False),
        ("x > 2", r"(-\infty,2)", False),
        ("x < 1 or x > 2", UNION, False),
        ("x < 1 or x >= 2", r"[2,\infty)", False),
        ("x < 1 or y >= 2", UNION, False),
        ("x < 1, x >= 2", UNION, False),
        ("x < 1 and x >= 2", UNION, False),
        ("x < 1 or x >= 2 or x >= 3", r"(-\infty,1)\cup[3,\infty)", False),
        ("x >= 2 or maybe x < 1", UNION, False),
        ("1 < x < 2", "(1,2)", False),
        ("1 < x > 2", r"(2,\infty)", False),
        (r"2 < 3", r"(2,\infty)", False),
        (rf"y \in {UNION}", "x < 1 or x >= 2", False),
        (rf"x \in {UNION}", r"y < 1 \text{ or } y \ge 2", False),
        (r"(-\infty,1]\cup[2,\infty)", "x < 1 or x >= 2", False),
        ("x \\ne 2", r"(-\infty,2)\cup(2,\infty)", False),
        (r"\{2, 3\}", "[2,3]", False),
    ],
)
def test_inequalities_and_their_intervals(answer: str, truth: str, right: bool) -> None:
    assert compute_score("math", f"Answer: {answer}", truth)["acc"] is right
