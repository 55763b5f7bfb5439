"""Verdicts of `math`, `math_verify` and `gsm8k` on the answers of `verdicts.tsv`, and the filter before the library."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.answers.latex_filter import is_tame
from dapo.rewards import gsm8k, math, math_verify
from tests.support.rewards.tables import meant, rows

FUNCTIONS = {"math": [math], "math_verify": [math_verify], "both": [math, math_verify], "gsm8k": [gsm8k]}
ROWS = rows(Path(__file__).with_name("verdicts.tsv"))
CASES = [
    pytest.param(module, *row[1:], id=f"{module.__name__.rpartition('.')[2]}: {row[1][:50]}")
    for row in ROWS
    for module in FUNCTIONS.get(row[0], ())
]


@pytest.mark.timeout(60)  # some texts would hang a careless pattern
@pytest.mark.parametrize(("module", "text", "truth", "verdict"), CASES)
def test_verdict(module: Any, text: str, truth: str, verdict: str) -> None:
    began = time.process_time()
    given = module.compute_score("source", meant(text), meant(truth))
    assert module is math_verify or time.process_time() - began < 1
    assert (given["score"], given["acc"]) == ((1.0, True) if verdict == "right" else (-1.0, False)), given["pred"]
    assert given["pred"].isprintable() and len(given["pred"]) <= 2 * module.READS_LAST


@pytest.mark.parametrize(("latex", "verdict"), [(row[1], row[3]) for row in ROWS if row[0] == "is_tame"])
def test_what_the_filter_lets_through(latex: str, verdict: str) -> None:
    assert is_tame(meant(latex)) is (verdict == "right")


@pytest.mark.parametrize(
    ("solution", "prediction"),
    [
        ("\\boxed{\\frac{1}{2}}<|im_end|>", r"\frac{1}{2}"),
        ("\\boxed{4", ""),
        ("Answer: 12\x00\ud800", "12\ufffd\ufffd"),
        ("\\boxed{41} and \\boxed{42}", "\\boxed{41} and \\boxed{42}"),
        ("Answer: $4$ $2$", "$4$ $2$"),
        ("Answer: 41\\quad 42\x00", "41\\quad 42\ufffd"),
    ],
)
def test_the_prediction_is_what_was_read(solution: str, prediction: str) -> None:
    assert math.compute_score("", solution, "42")["pred"] == prediction


@given(st.text(st.characters(), max_size=60), st.integers(-(10**6), 10**6))
def test_any_text_gets_a_verdict(answer: str, truth: int) -> None:
    verdict = math.compute_score("", f"Answer: {answer}", str(truth))
    assert verdict["score"] == (1.0 if verdict["acc"] else -1.0)
    assert math.compute_score("", f"{answer}\nAnswer: {truth:,}", str(truth))["acc"]


@pytest.mark.parametrize("latex", ["9^{9^{9}}", "100000000!", "(" * 60 + "x" + ")" * 60, "eval(x)", "x" * 201])
def test_the_library_sees_only_what_the_filter_lets_through(latex: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_verify, "_parse", lambda latex: pytest.fail("the library was asked"))
    assert math_verify.compute_score("", f"Answer: {latex}", r"\sqrt{2}")["acc"] is False


def test_a_library_that_swallows_its_errors_fails_a_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_verify, "verify", lambda *arguments, **options: False)
    known = math_verify.canaries("compute_score", {})
    assert any(math_verify.compute_score("", text, truth)["score"] != score for text, truth, _, score in known)


def test_the_library_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Its log quotes the model's text."""
    with caplog.at_level(logging.DEBUG):
        assert math_verify.compute_score("", "Answer: $\\sqrt{32}$", r"4\sqrt{2}")["acc"] is True
    assert caplog.records == []


def test_an_error_of_the_library_is_wrong_but_its_lack_of_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: type[BaseException]) -> None:
        def fail(*arguments: object, **options: object) -> bool:
            raise error

        monkeypatch.setattr(math_verify, "verify", fail)

    for error in (TypeError, RecursionError, NotImplementedError):
        raising(error)
        assert math_verify.compute_score("", r"Answer: $\sqrt{8}$", r"2\sqrt{2}")["acc"] is False
    raising(MemoryError)
    with pytest.raises(MemoryError):
        math_verify.compute_score("", r"Answer: $\sqrt{8}$", r"2\sqrt{2}")


def test_an_expression_that_failed_once_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(math_verify, "parse", lambda *arguments, **options: [])
        assert math_verify.compute_score("", r"Answer: $\sqrt{98}$", r"7\sqrt{2}")["acc"] is False
    assert math_verify.compute_score("", r"Answer: $\sqrt{98}$", r"7\sqrt{2}")["acc"] is True


# What the patterns that read an answer can match again and again, alone and in pairs.
UNITS = (
    *(
        "</s>",
        "<s>",
        "</b>",
        "<eos>",
        "<|end|>",
        "<\uff5cend\uff5c>",
        "$",
        "$$",
        "\\$",
        "\\,",
        "\\!",
        "\\;",
        "\\ ",
        "~",
        " ",
        "*",
        "_",
        "`",
    ),
    *(
        "{",
        "}",
        "{}",
        "(",
        ")",
        "[",
        "]",
        "()",
        "\\(",
        "\\)",
        "\\boxed{",
        "\\boxed{1}",
        "\\text{",
        "\\text{a}",
        "\\frac{",
        "\\frac12",
    ),
    *(
        "\\sqrt",
        "\\sqrt{",
        "^",
        "^2",
        "_{1}",
        "\\circ",
        "\u00b0",
        "\\quad",
        "\\qquad ",
        "1",
        "1,",
        "1,000",
        "1.",
        "1/",
        "1 ",
        "-",
        "+",
    ),
    *(
        "=",
        "<",
        ">",
        "x",
        "x=",
        "x < ",
        "A",
        "A,",
        "(A)",
        "or ",
        " and ",
        ", or ",
        ";",
        ":",
        "Answer:",
        "answer: ",
        "\n",
        "#### ",
        "cm",
        "cm ",
        "%",
    ),
    *(
        "1 cm",
        "sq. ",
        "per ",
        "dollars ",
        "million ",
        '"',
        '["a"',
        "\\cup",
        "\\infty",
        "(1,2)",
        "[1,2]",
        "\\pm",
        "\\times",
        "is ",
        "the answer is ",
    ),
    *("½", "²", "₂", "√", "√(", "π", "≤", "≈", "\\approx ", "approximately ", "\\ge", "x_1", "x(", "P(X", "|", "'"),
    *("(or ", "(i.e. ", ", where ", "I hope it is correct", "∎", "(C) ", "**Answer**\n", "# Answer\n", "\\mathbb{R}"),
    *("！", "，", "。", "\\binom{5}{2}", "5!", "(n)!", "per hour", "square ", "^\\circ", "it is ", "not ", "or 1/2 "),
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("module", [math, gsm8k, math_verify], ids=["math", "gsm8k", "math_verify"])
def test_repeated_text_costs_bounded_work(module: Any) -> None:
    """A pattern that can match the same text in several ways takes time that doubles with each repetition."""
    slow = []
    for first, second in [(unit, "") for unit in UNITS] + [("</s>", unit) for unit in UNITS]:
        unit = first + second
        for end in ("", "x", "}", "<"):
            label = "####" if module is gsm8k else "Answer:"
            text = f"{label} 42{unit * (280 // len(unit))}{end}"
            began = time.process_time()
            is_tame(text) if module is math_verify else module.compute_score("source", text, "42")
            if time.process_time() - began > 1:
                slow.append((unit, end))
    assert slow == []
