"""Answers that say more than the truth: a choice and its text, what a number counts, sentences, ratios, repeats."""

import time

import pytest

from dapo.rewards import math, math_verify

BOTH = pytest.mark.parametrize("verifier", [math, math_verify])
KINDS = {
    "choice": (
        ("(C) 42", "C"),
        ("C) 42", "C"),
        ("C. Paris", "(C)"),
        ("C: 42", "C"),
        ("(C) $\\frac{1}{2}$", "C"),
        ("(C) Paris, France", "C"),
        ("**(C)** Paris", "C"),
        (r"\boxed{\textbf{(C) }42}", "C"),
        (r"\textbf{(C)}\ 42", "C"),
        (r"\boxed{\text{(C)}~42}", "C"),
        ("Option C", "C"),
        ("choice (C)", "C"),
        ("(C) 42", "(C) 42"),
    ),
    "counted": (
        ("5 apples", "5"),
        ("5 children", "5"),
        (r"$60 \text{ sq. ft}$", "60"),
        (r"5 \text{ young women}", "5"),
        ("1,200 red apples", "1200"),
        (r"\frac{1}{2} cups", "0.5"),
        ("x = 5 apples", "5"),
        (r"5 \text{ apples}", "5"),
        ("5", "5 apples"),
        ("5 m/s", "5"),
        (r"5 \text{ m/s}^2", "5"),
        ("60 miles per hour", "60"),
        ("1 1/2 cups", "1.5"),
        ("1 200 apples", "1200"),
        ("-3/4 miles per hour", "-0.75"),
        (r"2\frac{1}{2} apples", "2.5"),
        ("10^3 apples", "1000"),
        ("3 \\cdot 10^8 m/s", "300000000"),
        ("90 deg", "90"),
        (r"90\degree", "90"),
        ("\u20ac1,080.50", "1080.5"),
        ("7\u00a3", "7"),
        ("US$7", "7"),
        ("$7 per hour", "7"),
        (r"\$7/hour", "7"),
        *[
            (rf"5\,\{command}{{{unit}}}", "5")
            for command in ("text", "mathrm")
            for unit in ("m", "g", " L", "h", "N", "A")
        ],
        (r"\boxed{5\,\text{m}}.", "5"),
        (r"5\,\mathrm{m}^2", "5"),
        (r"\frac{1}{2}\text{ g}", "0.5"),
    ),
    "sentence": (
        ("The sum of m and n is 34.", "34"),
        ("The sum of $m$ and $n$ is $34$.", "34"),
        (r"Therefore, the value of $m+n$ is $\frac{1}{2}$.", "0.5"),
        ("So the total is 34 apples.", "34"),
        ("The correct answer is (C).", "C"),
        ("The correct choice is (C) 42", "C"),
        ("The sum of 33 and 1 equals 34", "34"),
    ),
    "ratio": (("3/2", "3:2"), (r"\frac{3}{2}", "3 : 2"), ("3:2", "3:2")),
    "repeating": (
        (r"0.\overline{3}", "1/3"),
        (r"0.\overline{3}", r"0.\overline{3}"),
        ("1/3", r"$0.\overline{3}$"),
        (r"x = -1.1\bar{6}", "-7/6"),
        (r"0.\overline{9}", "1"),
        (r"0.\dot{3}", r"\frac{1}{3}"),
    ),
}
OTHERS = {
    "choice": (
        ("(C) 42 (D) 43", "C"),
        ("(C) 42, (D) 43", "C"),
        ("(C) 42 and (D) 43", "C"),
        ("(C) or (D) 42", "C"),
        ("(C) is wrong", "C"),
        ("(C), maybe", "C"),
        ("(C) 42 rather than 43", "C"),
        ("(C)? 42", "C"),
        ("(C)(D) 42", "C"),
        ("(C)42x", "C"),
        ("C.42", "C"),
        ("C: D", "C"),
        ("C. D. E", "C"),
        ("(D) C", "C"),
        ("Not (C) 42", "C"),
        ("Option C or D", "C"),
        ("Options C", "C"),
        (r"\boxed{(C) 42} \boxed{43}", "C"),
        ("(c) 42", "C"),
        ("(K) 42", "K"),
        ("(C) 42", "42"),
        ("(C) 43", "(C) 42"),
        ("C", "C. elegans"),
    ),
    "counted": (
        ("5 apples", "5 oranges"),
        ("5 children", "5 apples"),
        ("5 or 6 children", "5"),
        ("5 more children", "5"),
        *[
            (answer, "5")
            for answer in ("5m", "5 g", "5L", r"5\cdot\text{m}", r"5\text{ m} + 1", r"-\,\text{m}", r"5\text{mg}2")
        ],
        *[(rf"5\text{{ h }}{more}", "5") for more in ("30", r"30\text{ min}", r"\text{ or }6\text{ h}")],
        (r"4\text{ m}, 5\text{ m}", "5"),
        ("5 km/h", "5 m/s"),
        ("\u20ac7", "\u00a37"),
        ("6 apples", "5 apples"),
        *[
            (f"5 {more}", "5")
            for more in ("dozen eggs", "dozens", "pairs", "million dollars", "halves", "sixes", "xdollars")
        ],
        *[
            (f"5 {more}", "5")
            for more in ("more", "times", "perhaps", "sometimes", "less", "among others", "apples less")
        ],
        *[(f"5 apples {more}", "5") for more in ("or 6", "and 6 oranges", "6 oranges", "+ 1")],
        *[
            (f"{more} apples", "5")
            for more in ("about 5", "less than 5", "5+1", "5-6", "5/6", "5x", "5 or six", "5 not")
        ],
        ("0cm5 miles", "5"),
        ("hours5 apples", "5"),
        ("5 m", "5"),
        ("5 m/x", "5"),
        ("5/s", "5"),
        ("-$7", "7"),
        *[(f"$7{more}", "7") for more in (" million", "k", "-$8", ", $8", " or $8", " per 2 hours")],
        ("\u20ac7 or \u20ac8", "7"),
    ),
    "sentence": (
        *[
            (f"The answer is {more}", "34")
            for more in ("not 34", "33 or 34", "33, 34", "about 34", "34 or so", "at most 34")
        ],
        *[
            (f"The answer is {more}", "34")
            for more in ("34x", "17+17", "34?", "34 million", "-34", "that the sum is 34")
        ],
        *[(f"The {more} is 34", "34") for more in ("wrong answer", "other answer", "possible answer", "answer = 33")],
        ("The sum is 33 and the product is 34", "34"),
        ("The answer is 33. The answer is 34", "34"),
        ("My guess for the answer is 34", "34"),
        ("The answer if n is even is 34", "34"),
        ("The sum or product is 34", "34"),
        ("The sum of 33 and 34 is 67", "34"),
        ("The answer is C, D", "C"),
        ("The answer is a", "A"),
        ("The answer is 3 cm4", "34"),
    ),
    "ratio": (("2/3", "3:2"), ("6:4", "3:2"), ("1:3", "1/3"), ("4", "4:1"), ("3/2", "3:2:1"), ("12/5", "12:05")),
    "repeating": (("0.3", r"0.\overline{3}"), (r"0.\overline{16}", "1/6"), (r"0.\overline{3}", r"0.\overline{4}")),
}


@BOTH
@pytest.mark.parametrize(
    ("answer", "truth"), [pytest.param(*pair, id=kind) for kind, pairs in KINDS.items() for pair in pairs]
)
def test_what_says_more_is_right(verifier: object, answer: str, truth: str) -> None:
    verdict = verifier.compute_score("math", f"Answer: {answer}", truth)  # type: ignore[attr-defined]
    assert verdict["acc"] is True, verdict["pred"]


@BOTH
@pytest.mark.parametrize(
    ("answer", "truth"), [pytest.param(*pair, id=kind) for kind, pairs in OTHERS.items() for pair in pairs]
)
def test_what_says_something_else_is_wrong(verifier: object, answer: str, truth: str) -> None:
    verdict = verifier.compute_score("math", f"Answer: {answer}", truth)  # type: ignore[attr-defined]
    assert verdict["acc"] is False, verdict["pred"]


def test_texts_that_nearly_say_more_are_read_at_once() -> None:
    for text in (
        "The sum of " + "a " * 130 + "is",
        "The " + "answer " * 40 + "is 34 x",
        "5" + " apples" * 40 + "!",
        "5 " + "a" * 280,
        "5" * 140 + " apples" * 20 + "x",
        "(C) " + "is" * 140,
        "\\boxed{" * 40 + "5 apples" + "}" * 39,
        "0." + "\\overline{3}" * 20,
    ):
        began = time.process_time()
        assert math.compute_score("math", f"Answer: {text}", "34")["acc"] is False
        assert time.process_time() - began < 0.5
