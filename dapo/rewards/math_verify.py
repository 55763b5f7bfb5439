"""Verifies symbolic answers: `dapo.rewards.math` first and, without a match, the library math-verify.

A list without brackets is a set: 2,1 is correct for 1,2. If order matters, the ground truth has brackets, (1,2), or
names.

Security: the library only receives expressions that `answers/latex_filter.py` accepts, in dollar signs, and only its
LaTeX parser is configured; its parser of plain expressions passes text to Python. Numbers of that grammar still go
through sympy's text parser, which evaluates; its lexer accepts only digits, dot, comma, sign and exponent as a number,
and the filter only passes ASCII without exponents. The library's timeouts are off, because they hide errors and need
signals; the child process is killed from outside. Its log is off, because it quotes the model's text.
"""

import logging
import math
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from dapo.answers.answer import (
    TAIL_CHARS,
    UNIT_AS_TEXT,
    Reading,
    agree,
    as_written,
    choice_text,
    find_answer,
    read,
    read_truth,
    truth_text,
)
from dapo.answers.latex_filter import MAX_CHARS, is_tame
from dapo.answers.lists import alternatives, items
from dapo.answers.relations import RELATION, as_intervals, has_inequality, is_name, is_of_intervals
from dapo.answers.spelling import formula, without_units

READS_LAST = TAIL_CHARS  # characters of a solution that the score depends on

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

# The default except for units: the library would read the t of 5t and the h of \pi r^2 h as units.
_NORMAL = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
)
_LATEX = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_NORMAL)]
_LETTERS = re.compile(r"[A-Z]{3,}")  # an order of points or choices, not a product
_OPERATION = re.compile(r"^(?!.*(?<![A-Za-z\\])[A-Za-z]{3}).*[-+*/^0-9\\]")  # not in a sentence
_BASE = re.compile(r"[0-9] ?_ ?\{? ?([0-9]+)")  # base of a number, 1010_2, which the library drops
_COUNT = re.compile(
    r"\\[dt]?binom ?\{([^{}]{1,12})\} ?\{([^{}]{1,12})\}"
    r"|(?<![0-9A-Za-z\\.!)}^])(?:([0-9]{1,2}|[A-Za-z])|\(([^()!]{1,12})\)) ?!(?! ?!)"
)
_LETTER = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_SPARE = "zwqvukshgjtrnmlcabfpxy"  # except those that the library reads as numbers and differentials
_ITEM_NAME = re.compile(r"(?<![^ ,])([A-Za-z](?:_[0-9A-Za-z])?) *= *")
_SET = re.compile(r"(?:([A-Za-z]) ?\\in ?)?((?:\\left ?)?[(\[].*[)\]])")  # x \in [-2,7], or the interval alone


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """As `dapo.rewards.math`. A ground truth that is a number is only compared by that rule, so that 1+1 does not match
    2. Raises nothing except MemoryError."""
    text, truth = as_written(find_answer(solution_str)), as_written(truth_text(str(ground_truth)))
    answer = read(text)
    correct = _is_right(text, answer, truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer.shown}


def canaries(name: str, kwargs: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any], float]]:
    yield "Answer: 1,080", "1080", {}, 1.0
    yield "Answer: $\\frac{1}{\\sqrt{2}}$", "\\frac{\\sqrt{2}}{2}", {}, 1.0
    yield "So it is \\boxed{(x+1)^2}.", "x^2+2x+1", {}, 1.0
    yield "Answer: $\\sqrt{3}$", "\\frac{\\sqrt{2}}{2}", {}, -1.0
    yield "Answer: 1+1", "2", {}, -1.0
    yield "I cannot tell.", "x^2+2x+1", {}, -1.0


def _is_right(text: str, answer: Reading, truth: str) -> bool:
    expected = read_truth(truth)
    if answer.nothing or expected.nothing:
        return False
    other = not expected.several and expected.value is None and _is_other_form(text, truth)
    if not other and agree(answer, expected):
        return True
    whole = other or bool(expected.relation)
    if (expected.value is not None and not whole) or _LETTERS.fullmatch(truth.strip(" $")):
        return False
    if answer.unit and expected.unit and answer.unit != expected.unit:
        return False
    text = choice_text(text)
    if (same := _solved(text, truth)) is not None:
        return same
    if answer.several and not expected.several and (parts := alternatives(text)):
        return all(_is_right(part, read(part), truth) for part in parts)
    if (answer.several or "\\pm" in text) != (expected.several or "\\pm" in truth):
        return False
    if expected.several:
        left, right = _items(truth), _items(text)
    else:
        left, right = _expression(truth, right_side=not whole), _expression(text, right_side=not whole)
    if whole and not RELATION.search(right):  # 4 is not x^2 + y^2 = 4
        solved = _SET.fullmatch(right) if has_inequality(left) else None
        if solved is None or (solved[1] or "") not in left:
            return False
        right = solved[2]
    bases = [sorted(_BASE.findall(side)) for side in (left, right)]
    if all(bases) and bases[0] != bases[1]:
        return False
    return left.replace(" ", "") == right.replace(" ", "") or _equal(left, right)


def _solved(text: str, truth: str) -> bool | None:
    """Whether inequalities and a set of intervals are the same solutions. None if the texts are not these two, and for
    a single inequality as ground truth, which the library compares."""
    left, right = _expression(truth, right_side=False), _expression(text, right_side=False)
    if is_of_intervals(left) and (found := as_intervals(text)):
        return _equal(left, found)
    named = _SET.fullmatch(right)
    if named and is_of_intervals(named[2]) and "or" in truth and (wanted := as_intervals(truth)):
        other = named[1] and not re.search(rf"(?<![A-Za-z]){named[1]}(?![A-Za-z])", truth)
        return not other and _equal(wanted, named[2])
    return None


def _is_other_form(text: str, truth: str) -> bool:
    """Whether a named value is answered by an equation in another form: y = 2x by 2x - y = 0."""
    left, equals, _ = _expression(text, right_side=False).partition("=")
    return "=" in truth and bool(equals and _OPERATION.search(left)) and not is_name(left)


def _items(text: str) -> str:
    """Returns a list of answers separated by commas, without a name that all share: x = 1 or x = 2 becomes 1, 2."""
    text = ", ".join(_expression(item, right_side=False) for group in items(text) for item in group)
    names = _ITEM_NAME.findall(text)
    if len(set(names)) == 1 and len(names) == text.count(",") + 1:
        text = _ITEM_NAME.sub("", text)
    return text


def _expression(text: str, *, right_side: bool) -> str:
    text = (
        without_units(formula(UNIT_AS_TEXT.sub(" ", text), right_side=right_side))
        .replace("$", "")
        .replace("\\displaystyle", "")
    )
    return text.replace("{,}", ",").replace("\\varnothing", "\\emptyset").strip()


def _equal(left: str, right: str) -> bool:
    """Whether two expressions are equal; False if they do not pass the filter or cannot be compared. Raises
    MemoryError."""
    left, right = _without_counts(left, right)
    if not is_tame(left) or not is_tame(right):
        return False
    left, right = _without_twins(left, right)
    try:
        one, other = _parse(left), _parse(right)
        return bool(verify(one, other, timeout_seconds=None, raise_on_error=True)) and _is_close(one[0], other[0])
    except MemoryError:
        raise
    except Exception:  # the library may raise anything on expressions without a value or that it cannot parse
        return False


def _without_counts(*sides: str) -> list[str]:
    """Replaces small factorials and binomial coefficients, which the filter rejects: numeric ones by their values,
    those of letters by an unused letter, the same in all expressions."""
    text = " ".join(sides)
    spare = (letter for letter in _SPARE if letter not in text.lower())
    letters: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        top, bottom, single, many = match.groups()
        number = top if bottom is not None else single or many
        if number.isdigit() and (bottom or "0").isdigit():
            if max(len(number), len(bottom or "")) > 2:
                return match[0]
            count = math.factorial(int(number)) if bottom is None else math.comb(int(number), int(bottom))
            return f"({count})"
        name = f"{number};{bottom}".replace(" ", "")
        return letters.get(name) or letters.setdefault(name, next(spare, match[0]))

    return [_COUNT.sub(value, side) for side in sides]


def _without_twins(*sides: str) -> list[str]:
    """Renames letters that occur as both capital and small, and T: the library turns R into r and drops an exponent
    T."""
    found = {name for side in sides for name in _LETTER.findall(side)}
    spare = iter([letter for letter in _SPARE if not found & {letter, letter.upper()}])
    twins = [name for name in sorted(found) if name == "T" or (name != name.lower() and name.lower() in found)]
    other = {name: next(spare, name) for name in twins}
    return [_LETTER.sub(lambda match: other.get(match[0], match[0]), side) for side in sides] if other else [*sides]


def _is_close(one: Any, other: Any) -> bool:
    """Whether values agree to a relative 1e-6, alone or in a list, set or tuple; True for expressions without a value.
    The library compares only six decimals: 0.0 would be correct for every small ground truth."""
    try:
        expected, got = _values(one), _values(other)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return True
    return len(got) == len(expected) and all(
        mine == wanted or abs(mine - wanted) <= 1e-6 * abs(wanted) for mine, wanted in zip(got, expected, strict=True)
    )


def _values(expression: Any) -> list[float]:
    """Returns the value of an expression, or of its items in ascending order. Raises TypeError if there is none."""
    try:
        return [float(expression.evalf())]
    except (TypeError, AttributeError):
        if expression.free_symbols:
            raise TypeError("an expression with letters has no value") from None
        items = [
            item for item in expression.args if getattr(item, "is_number", False)
        ]  # an interval's open/closed flags are not numbers
        return sorted(float(item.evalf()) for item in items)


@lru_cache(maxsize=1024)  # errors are not cached: a MemoryError must not affect a ground truth permanently
def _parse(latex: str) -> list[Any]:
    assert len(latex) <= MAX_CHARS and "$" not in latex
    found: list[Any] = parse(
        f"${latex}$",
        extraction_config=_LATEX,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    if not found:
        raise ValueError(f"{latex!r} is no expression")
    return found


# The first use builds the grammar's tables and regular expressions, which forked children inherit.
_equal("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}")
