"""The library math-verify with its defaults, as its users run it, to compare our verdicts with."""

import logging
import re
import warnings
from fractions import Fraction

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

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


def accepts(solution: str, answer: str, truth: str, value: Fraction) -> bool:
    """Whether the library finds the answer right in a box of its own, as it is written or in a plainer spelling, or the
    boxes of the solution; of a text without any it would take the last number. value: of the truth, which the library
    does not compare exactly between fractions and decimals."""
    texts = (answer, answer.split("\n")[0], CORRECTED.sub("", answer))
    given = [f"\\boxed{{{text}}}" for text in (*texts, *map(plainer, texts))]
    if "\\boxed" in solution:
        given += [solution, plainer(solution), plainer(CORRECTED.sub("", solution))]
    truths = (truth, f"{float(value):.12g}")
    return any(_equal(text, expected) for expected in truths for text in dict.fromkeys(given))


def plainer(text: str) -> str:
    """An answer without what the library cannot read."""
    text = OPEN_BOX.sub("", text)
    for _ in range(3):
        for pattern, kept in PLAIN:
            text = re.sub(pattern, kept, text)
    return text


def _equal(text: str, truth: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            gold, given = (parse(one, parsing_timeout=None) for one in (f"\\boxed{{{truth}}}", text))
            return bool(verify(gold, given, timeout_seconds=None))
        except Exception:  # what it cannot read raises anything
            return False
