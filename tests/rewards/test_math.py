"""The rule verifier against handwritten answers and adversarial texts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dapo.rewards.math as verifier
from dapo.rewards import math_verify
from dapo.rewards.math import compute_score

SIGNS = "\u00d7\u00f7\u00b7\u22c5\u00b1*"  # of products, quotients and both signs


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        pytest.param("204", "204", id="integer"),
        pytest.param("25", "025", id="aime-leading-zero"),
        pytest.param("025", "25", id="leading-zero-in-the-answer"),
        pytest.param("1234", "1,234", id="gsm8k-thousands"),
        pytest.param("1,234,567.50", "1234567.5", id="thousands-and-decimals"),
        pytest.param("10{,}000", "10000", id="latex-thousands-braces"),
        pytest.param(r"10\,000", "10000", id="latex-thin-space"),
        pytest.param(r"10,\!000", "10000", id="latex-negative-space"),
        pytest.param("-7", "\u22127", id="unicode-minus"),
        pytest.param("+7", "7", id="plus-sign"),
        pytest.param("3.0", "3", id="decimal-of-an-integer"),
        pytest.param(".5", "1/2", id="decimal-of-a-fraction"),
        pytest.param("42.", "42", id="closing-dot"),
        pytest.param("2/4", r"\frac{1}{2}", id="fraction-by-value"),
        pytest.param(r"-\dfrac{1}{2}", "-1/2", id="dfrac-with-sign"),
        pytest.param(r"\frac{-1}{2}", "-0.5", id="sign-in-the-numerator"),
        pytest.param(r"\frac{1}{-2}", "-0.5", id="sign-in-the-denominator"),
        pytest.param(r"\tfrac12", r"\frac{1}{2}", id="frac-without-braces"),
        pytest.param(r"1\frac{1}{2}", "3/2", id="mixed-number-in-latex"),
        pytest.param("-1 1/2", "-1.5", id="mixed-number"),
        pytest.param("1 2", "12", id="spaces-inside-a-number"),
        pytest.param("1 080 000", "1080000", id="thousands-by-spaces"),
        pytest.param("1\u202f080", "1080", id="thousands-by-narrow-spaces"),
        pytest.param("**1 080**", "1080", id="spaces-in-bold"),
        pytest.param("540.0", "540", id="zero-decimals"),
        pytest.param("540.", "540", id="no-decimals-behind-the-dot"),
        pytest.param("1,080", "1,080", id="thousands-in-the-truth"),
        pytest.param("0.5", "1/2", id="decimal-for-a-fraction"),
        pytest.param(r"\frac{1}{2}", "0.5", id="fraction-for-a-decimal"),
        pytest.param(r"\frac{1}{2}", "1/2", id="fraction-for-a-slash"),
        pytest.param("1/2", r"\frac{1}{2}", id="slash-for-a-fraction"),
        pytest.param("42<|im_end|>", "42", id="token-of-qwen"),
        pytest.param("42</s>", "42", id="token-of-llama"),
        pytest.param("42.<|eot_id|><|end_of_text|>", "42", id="two-tokens"),
        pytest.param("**42**<|endoftext|> ", "42", id="token-behind-bold"),
        pytest.param("42<\uff5cend\u2581of\u2581sentence\uff5c>", "42", id="token-of-deepseek"),
        pytest.param("42</answer>", "42", id="closing-tag"),
        pytest.param("x >= 42", "42", id="right-of-the-equals-sign-as-in-dapos-rule"),
        pytest.param("Hence, the result is $42$.", "42", id="a-comma-in-a-sentence"),
        pytest.param("f(1, 2) = 42", "42", id="a-comma-in-brackets"),
        pytest.param("With a, b coprime, a + b = 42", "42", id="commas-left-of-the-equation"),
        pytest.param("x = 1 or x = 2", "x=1 or x=2", id="a-list-when-the-truth-is-one"),
        pytest.param("(1, 2)", "(1,2)", id="a-pair-as-a-string"),
        pytest.param("_42_", "42", id="markdown-underscores"),
        pytest.param('"42"', "42", id="quotation-marks"),
        pytest.param("$42$", "42", id="dollars"),
        pytest.param("$$42$$.", "42", id="double-dollars"),
        pytest.param(r"\(42\)", "42", id="round-delimiters"),
        pytest.param("\\[\n42\n\\]", "42", id="display-formula-below"),
        pytest.param(r"\boxed{42}", "42", id="boxed"),
        pytest.param(r"$\boxed{\frac{3}{4}}$", "0.75", id="boxed-fraction"),
        pytest.param(r"\boxed{\boxed{42}}", "42", id="boxed-twice"),
        pytest.param("the number is $42$ indeed", "42", id="formula-in-a-sentence"),
        pytest.param("** 42**", "42", id="markdown-bold"),
        pytest.param("`42`", "42", id="markdown-code"),
        pytest.param("x = 42", "42", id="equation"),
        pytest.param("n = 40 + 2 = 42", "42", id="chain-of-equations"),
        pytest.param("x = 1,234", "1234", id="equation-with-thousands"),
        pytest.param("$18", "18", id="currency"),
        pytest.param(r"\$18.00", "18", id="escaped-currency"),
        pytest.param("18 dollars", "18", id="unit-word"),
        pytest.param(r"18\text{ cm}^2", "18", id="unit-in-latex"),
        pytest.param("60 miles per hour", "60", id="compound-unit"),
        pytest.param(r"30^\circ", "30", id="degrees"),
        pytest.param(r"30^{\circ}", "30", id="degrees-in-braces"),
        pytest.param(r"50\%", "50", id="percent"),
        pytest.param(r"\text{(C)}", "(C)", id="text-command"),
        pytest.param("**(C)**", "C", id="a-choice-in-parentheses"),
        pytest.param(r"$\boxed{\textbf{(C)}}$", "C", id="a-choice-in-a-box"),
        pytest.param("C.", "(C)", id="a-choice-without-parentheses"),
        pytest.param(r"\textbf{\text{no solution}}", "no solution", id="nested-text-commands"),
        pytest.param("yes", "Yes", id="a-capital-in-the-truth"),
        pytest.param(r"\text{No}", "no", id="a-capital-in-the-answer"),
        pytest.param("No solution.", "no solution", id="a-capital-of-two-words"),
        pytest.param(r"2 \sqrt 3", r"2\sqrt{3}", id="root"),
        pytest.param(r"\left( 1, 2 \right)", "(1,2)", id="pair"),
        pytest.param(r"\dfrac{\pi}{2}", r"\frac{\pi}{2}", id="symbolic-fraction"),
        pytest.param("x^{2}+1", "x^2+1", id="exponent-braces"),
        pytest.param(" 42 \r", "42", id="white-space"),
        pytest.param("1" + "0" * 200, "1" + "0" * 200, id="a-very-long-integer-as-a-string"),
    ],
)
def test_right_answers(answer: str, truth: str) -> None:
    verdict = compute_score("math_dapo", f"Some steps.\nAnswer: {answer}", truth)
    assert (verdict["score"], verdict["acc"]) == (1.0, True), verdict["pred"]


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        pytest.param("43", "42", id="another-integer"),
        pytest.param("-42", "42", id="sign"),
        pytest.param("0.33", "1/3", id="rounded-fraction"),
        pytest.param("12,\\ 345", "12345", id="a-comma-and-a-space-are-a-list"),
        pytest.param("100, 200", "100200", id="a-list-that-looks-like-thousands"),
        pytest.param("$1, 2$", "12", id="a-list-in-a-formula"),
        pytest.param("1{,}2", "12", id="a-list-with-braces"),
        pytest.param("$41$ $42$", "41", id="two-formulas"),
        pytest.param("$42$ 43", "42", id="a-number-beside-the-formula"),
        pytest.param(r"\boxed{41}, \boxed{42}", "42", id="two-boxes"),
        pytest.param(r"\boxed{A} \boxed{B}", "B", id="two-choices-in-boxes"),
        pytest.param("$A$, $B$", "A", id="two-choices-in-formulas"),
        pytest.param("A, B", "A", id="two-choices"),
        pytest.param("(A), (B)", "A", id="two-choices-in-parentheses"),
        pytest.param("(A)(B)", "A", id="a-product-of-choices"),
        pytest.param("(D)", "C", id="another-choice"),
        pytest.param("42 AND 43", "42", id="upper-case-and"),
        pytest.param(r"41\text{ or }42", "42", id="or-in-a-text-command"),
        pytest.param("42; 43", "42", id="semicolon"),
        pytest.param("-$42$", "42", id="a-sign-before-the-formula"),
        pytest.param(r"\pm $42$", "42", id="both-signs"),
        pytest.param("$1$+1", "1", id="half-a-calculation"),
        pytest.param("1+1", "2", id="a-sum"),
        pytest.param("84/2", "42", id="a-division-that-comes-out-even"),
        pytest.param(r"\frac{84}{2}", "42", id="a-division-in-latex"),
        pytest.param(r"6 \times 7", "42", id="a-product"),
        pytest.param("2^{3}", "8", id="a-power"),
        pytest.param(r"\sqrt{4}", "2", id="a-root"),
        pytest.param("x = 7, x = 2", "x = 1, x = 2", id="lists-with-one-end"),
        pytest.param("2", "x = 1 or x = 2", id="one-answer-of-two"),
        pytest.param("1,2", "12", id="a-list-is-no-number"),
        pytest.param("12,34", "1234", id="commas-not-by-thousands"),
        pytest.param("41 or 42", "42", id="two-guesses"),
        pytest.param("x = 41 or x = 42", "42", id="two-guesses-as-equations"),
        pytest.param("x = 41, y = 42", "42", id="two-unknowns"),
        pytest.param("$42$ or 43", "42", id="a-guess-outside-the-formula"),
        pytest.param("a", "A", id="a-letter-is-no-word"),
        pytest.param("ab", "AB", id="a-product-is-no-word"),
        pytest.param("abc", "ABC", id="an-order-of-points-is-no-word"),
        pytest.param("no", "Yes", id="another-word"),
        pytest.param("42x", "42", id="coefficient"),
        pytest.param("3m", "3", id="one-letter-is-a-variable"),
        pytest.param("42 million", "42", id="scale-word"),
        pytest.param("40 + 2", "42", id="never-calculated"),
        pytest.param("4e1", "40", id="no-exponents"),
        pytest.param("1/0", "0", id="division-by-zero"),
        pytest.param(r"\frac{1}{0}", "0", id="division-by-zero-in-latex"),
        pytest.param(r"4 \quad 2", "42", id="wide-space-between"),
        pytest.param("$4$ $2$", "42", id="two-formulas"),
        pytest.param(r"\(4\) \(2\)", "42", id="two-formulas-in-round-delimiters"),
        pytest.param("$$4$$ $$2$$", "42", id="two-display-formulas"),
        pytest.param("4°2", "42", id="degree-sign-inside"),
        pytest.param(r"1+\boxed{42}", "42", id="box-after-an-operator"),
        pytest.param(r"\boxed{42}^2", "42", id="box-with-an-exponent"),
        pytest.param(r"\sqrt{\boxed{42}}", "42", id="box-in-a-root"),
        pytest.param(r"2 \cdot \boxed{42}", "42", id="box-in-a-product"),
        *[pytest.param(f"2 {sign} \\boxed{{42}}", "42", id=f"box-behind-{ascii(sign)}") for sign in SIGNS],
        *[pytest.param(f"\\boxed{{42}} {sign} 2", "42", id=f"box-before-{ascii(sign)}") for sign in SIGNS],
        pytest.param(r"\boxed{42} \pm x", "42", id="box-before-both-signs"),
        pytest.param("٤٢", "42", id="other-digits"),
        *[pytest.param(f"4{char}2", "42", id=f"control-{ord(char):02x}-inside") for char in "\x0b\x0c\r\x1c\x1f\x85"],
        pytest.param("", "42", id="empty"),
        pytest.param("$", "", id="nothing-is-never-right"),
        pytest.param(".", ".", id="a-dot-is-nothing"),
        pytest.param("[INVALID]", "[INVALID]", id="sentinel"),
        pytest.param("None", "None", id="sentinel-of-python"),
        pytest.param(r"\text{nan}", "nan", id="sentinel-of-tables"),
        pytest.param("$Answer", "Answer", id="the-prompts-own-example"),
        pytest.param("\u0664\u0662", "\u0664\u0662", id="other-digits-though-the-truth-has-them"),
        pytest.param("\U0001d7d2\U0001d7d0", "42", id="mathematical-digits"),
        pytest.param("4\u00b2", "42", id="superscript"),
    ],
)
def test_wrong_answers(answer: str, truth: str) -> None:
    verdict = compute_score("math_dapo", f"Some steps.\nAnswer: {answer}", truth)
    assert (verdict["score"], verdict["acc"]) == (-1.0, False), verdict["pred"]


@pytest.mark.parametrize(
    ("solution", "prediction"),
    [
        pytest.param("Answer: 41\nNo.\nAnswer: 42", "42", id="the-last-answer-counts"),
        pytest.param("answer : 42", "42", id="case-and-space"),
        pytest.param("**Answer:** 42\nThat is all.", "42", id="only-its-own-line"),
        pytest.param("**Answer:**\n\n42", "42", id="next-line-that-holds-something"),
        pytest.param("Answer: 41\nAnswer:", "41", id="the-last-one-that-holds-something"),
        pytest.param("__Answer__: 42", "42", id="underscores-around-the-label"),
        pytest.param("*Answer* : *42*", "42", id="emphasis-around-label-and-answer"),
        pytest.param("Final Answer: the answer: 42", "42", id="two-labels-on-a-line"),
        pytest.param("\\boxed{41}\nAnswer: 42", "42", id="a-label-goes-before-a-box"),
        pytest.param("Answer: 42\nso \\boxed{41}", "42", id="also-when-the-box-comes-later"),
        pytest.param("\\boxed{41} no, \n\\boxed{42}", "42", id="the-last-box-counts"),
        pytest.param("so \\fbox{42} it is", "42", id="fbox"),
        pytest.param("\\boxed{\\frac{1}{2}}<|im_end|>", r"\frac{1}{2}", id="braces-in-the-box"),
        pytest.param("\\boxed{\n42\n}", "42", id="a-box-over-lines"),
        pytest.param("\\boxed{4", "", id="a-box-cut-off"),
        pytest.param("\\boxed{42} and \\boxed{}", "42", id="an-empty-box"),
        pytest.param("\\boxed{42}" + " " * 291, "", id="a-box-outside-the-tail"),
        pytest.param("The answer is 42", "", id="no-colon"),
        pytest.param(r"so \boxed{42}.", "42", id="no-label"),
        pytest.param("Answer: 42" + " " * 290, "42", id="just-within-the-tail"),
        pytest.param("Answer: 42" + " " * 291, "", id="just-outside-the-tail"),
        pytest.param("Answer: 12\x00\ud800", "12\ufffd\ufffd", id="unprintable-is-replaced"),
        pytest.param("", "", id="nothing-at-all"),
        pytest.param("\\boxed{41} and \\boxed{42}", "\\boxed{41} and \\boxed{42}", id="several-boxes-are-shown-all"),
        pytest.param("Answer: $4$ $2$", "$4$ $2$", id="several-formulas-are-no-number"),
        pytest.param("Answer: 41\\quad 42\x00", "41\\quad 42\ufffd", id="several-printable"),
    ],
)
def test_where_the_answer_is_read(solution: str, prediction: str) -> None:
    assert compute_score("math_dapo", solution, "42")["pred"] == prediction


@pytest.mark.timeout(20)  # a hang guard: each takes milliseconds
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("1e999999999", id="huge-exponent"),
        pytest.param("1E+999999999", id="huge-signed-exponent"),
        pytest.param("9**9**9**9", id="power-tower"),
        pytest.param("9^{9^{9^{9}}}", id="power-tower-in-latex"),
        pytest.param("100000000!", id="factorial"),
        pytest.param("1/1e-999999999", id="exponent-in-a-fraction"),
        pytest.param("9" * 280, id="digits-without-end"),
        pytest.param("1," + "000," * 60, id="thousands-without-end"),
        pytest.param("0." + "0" * 150 + "1/3", id="long-decimal-fraction"),
        pytest.param("(" * 60 + "42" + ")" * 60, id="nested-parentheses"),
        pytest.param("{" * 140 + "42" + "}" * 140, id="nested-braces"),
        pytest.param(r"\boxed{" * 40, id="open-boxes"),
        pytest.param(r"\text{" * 40 + "42" + "}" * 40, id="nested-text-commands"),
        pytest.param(r"\frac{1}{" * 30 + "42" + "}" * 30, id="nested-fractions"),
        pytest.param("=" * 280, id="equals-signs"),
        pytest.param("$ " * 140, id="dollar-signs"),
        pytest.param("5" + " hours" * 45 + "!", id="units-that-end-otherwise"),
        pytest.param("hours " * 45, id="units-of-nothing"),
        pytest.param(r"\operatorname{eye}(30000)", id="huge-matrix"),
        pytest.param('__import__("os").system("true")', id="code"),
        pytest.param("{0.__class__}%s%n", id="format-string"),
        pytest.param("4\x002", id="null-byte-inside"),
        pytest.param("\x0042", id="null-byte-before"),
        pytest.param("42\ud800", id="lone-surrogate"),
        pytest.param("4\u200b2", id="zero-width-space-inside"),
        pytest.param("\u202e24", id="right-to-left-override"),
        pytest.param("４２", id="full-width-digits"),
        pytest.param("\ufdfa" * 280, id="letters-that-expand-when-normalised"),
        pytest.param("42\u0301" * 90, id="combining-marks"),
        pytest.param("nan", id="not-a-number"),
        pytest.param("inf", id="infinity"),
    ],
)
def test_adversarial_answers_are_wrong_and_do_not_raise(answer: str) -> None:
    verdict = compute_score("math_dapo", f"Answer: {answer}", "42")
    assert (verdict["score"], verdict["acc"]) == (-1.0, False)
    assert verdict["pred"].isprintable() and len(verdict["pred"]) <= 2 * verifier.READS_LAST


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ["9", "(", "{", "answer:", "\n", "$ ", "\\"], ids=ascii)
def test_a_long_text_is_read_only_at_its_end(unit: str) -> None:
    text = unit * 1_000_000
    assert compute_score("math_dapo", text, "42")["acc"] is False
    assert compute_score("math_dapo", text + "\nAnswer: 42", "42")["acc"] is True


@pytest.mark.parametrize("score", [compute_score, math_verify.compute_score], ids=["math", "math_verify"])
@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ('["34"]', "34", "35"),
        (' ["\\\\frac{1}{2}"] ', "1/2", "1/3"),
        ('["34", "35"]', '["34", "35"]', "34"),  # which of them, or both, it does not say
        ("[2,7]", "[2,7]", "2"),
        ('["34", "34.0"]', "34", "35"),  # one answer in two spellings
        ('["\\\\frac{1}{2}","0.5" , "1/2"]', "0.5", "0.25"),
        ('["0.5", "1/2", "2"]', '["0.5", "1/2", "2"]', "0.5"),
        ('["none", "none"]', '["none", "none"]', "none"),
    ],
)
def test_a_json_list_of_one_text_is_that_text(score, truth: str, right: str, wrong: str) -> None:
    """Skywork-OR1's ground truths are said to be written so; none would equal an answer."""
    assert score("", f"Answer: {right}", truth)["acc"] and not score("", f"Answer: {wrong}", truth)["acc"]


def test_a_ground_truth_beyond_what_python_converts_is_no_number() -> None:
    assert compute_score("math_dapo", "Answer: 42", "9" * 5000)["acc"] is False


@settings(deadline=None)
@given(st.text(st.characters(), max_size=60), st.integers(-(10**6), 10**6))
def test_any_text_gets_a_verdict(answer: str, truth: int) -> None:
    verdict = compute_score("math_dapo", f"Answer: {answer}", str(truth))
    assert verdict["score"] == (1.0 if verdict["acc"] else -1.0)
    assert compute_score("math_dapo", f"{answer}\nAnswer: {truth:,}", str(truth))["acc"]
