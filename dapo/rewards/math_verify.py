"""Verifies symbolic answers: `dapo.rewards.math`, and where that finds no match, the library math-verify.

A list without brackets is a set: 2,1 is right for 1,2. A ground truth whose order counts has brackets, (1,2), or names.

The library sees only an expression that `reading/latex_filter.py` lets through, in dollar signs, and only its LaTeX
reader, a grammar that builds expressions, looks at it: its reader of plain expressions hands text to Python and is
never configured. A number of that grammar still goes through sympy's own text reader, which evaluates: digits, dot,
comma, sign and exponent are all that its lexer calls a number, and the filter lets through ASCII without exponents.
Its own timeouts are off, because they swallow errors and need signals; the worker's child process is killed from
outside. Its log is silent, because it quotes the model's text.
"""

import logging
import math
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from dapo.rewards.reading.answer import (
    TAIL_CHARS,
    Reading,
    agree,
    as_written,
    find_answer,
    read,
    read_truth,
    truth_text,
)
from dapo.rewards.reading.dress import UNIT_AS_TEXT, choice_text
from dapo.rewards.reading.intervals import as_intervals, is_of_intervals
from dapo.rewards.reading.latex_filter import MAX_CHARS, is_tame
from dapo.rewards.reading.lists import alternatives, items
from dapo.rewards.reading.relations import RELATION, has_inequality, is_name
from dapo.rewards.reading.spelling import formula, without_units

READS_LAST = TAIL_CHARS  # characters of a solution that the score depends on

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

# As by default, but for units: the library takes the last t of 5t, and h of \pi r^2 h, for one.
_NORMAL = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
)
_LATEX = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_NORMAL)]
_LETTERS = re.compile(r"[A-Z]{3,}")  # an order of points or choices, not a product
_OPERATION = re.compile(r"^(?!.*(?<![A-Za-z\\])[A-Za-z]{3}).*[-+*/^0-9\\]")  # in no sentence
_BASE = re.compile(r"[0-9] ?_ ?\{? ?([0-9]+)")  # of a number, 1010_2: the library drops it
_COUNT = re.compile(
    r"\\[dt]?binom ?\{([^{}]{1,12})\} ?\{([^{}]{1,12})\}"
    r"|(?<![0-9A-Za-z\\.!)}^])(?:([0-9]{1,2}|[A-Za-z])|\(([^()!]{1,12})\)) ?!(?! ?!)"
)
_LETTER = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_SPARE = "zwqvukshgjtrnmlcabfpxy"  # without those that the library takes for numbers and differentials
_ITEM_NAME = re.compile(r"(?<![^ ,])([A-Za-z](?:_[0-9A-Za-z])?) *= *")
_SET = re.compile(r"(?:([A-Za-z]) ?\\in ?)?((?:\\left ?)?[(\[].*[)\]])")  # x \in [-2,7], or the interval alone


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """Scores one solution, in verl's signature; only solution_str and ground_truth are looked at.

    Returns score (1.0 right, -1.0 wrong), acc (the same as a bool) and pred, as `dapo.rewards.math` does. A ground
    truth that is a number is left to that rule, so that 1+1 is not 2. Never raises, but for MemoryError.
    """
    text, truth = as_written(find_answer(solution_str)), as_written(truth_text(str(ground_truth)))
    answer = read(text)
    correct = _is_right(text, answer, truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer.shown}


def canaries(name: str, kwargs: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any], float]]:
    """Yields known answers, as (solution_str, ground_truth, extra_info, score), for the pool's check of itself."""
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
    """Returns whether inequalities and a set of intervals are the same solutions; None where they are not these two,
    and for one inequality as ground truth, which the library compares."""
    left, right = _expression(truth, right_side=False), _expression(text, right_side=False)
    if is_of_intervals(left) and (found := as_intervals(text)):
        return _equal(left, found)
    named = _SET.fullmatch(right)
    if named and is_of_intervals(named[2]) and "or" in truth and (wanted := as_intervals(truth)):
        other = named[1] and not re.search(rf"(?<![A-Za-z]){named[1]}(?![A-Za-z])", truth)
        return not other and _equal(wanted, named[2])
    return None


def _is_other_form(text: str, truth: str) -> bool:
    """Returns whether a value with a name is answered by an equation of more than a name: y = 2x by 2x - y = 0."""
    left, equals, _ = _expression(text, right_side=False).partition("=")
    return "=" in truth and bool(equals and _OPERATION.search(left)) and not is_name(left)


def _items(text: str) -> str:
    """Returns a list of answers with commas between, without the name where all have one: x = 1 or x = 2 is 1, 2."""
    text = ", ".join(_expression(item, right_side=False) for group in items(text) for item in group)
    names = _ITEM_NAME.findall(text)
    if len(set(names)) == 1 and len(names) == text.count(",") + 1:
        text = _ITEM_NAME.sub("", text)
    return text


def _expression(text: str, *, right_side: bool) -> str:
    """Returns what the library gets: the formula alone, without units."""
    text = (
        without_units(formula(UNIT_AS_TEXT.sub(" ", text), right_side=right_side))
        .replace("$", "")
        .replace("\\displaystyle", "")
    )
    return text.replace("{,}", ",").replace("\\varnothing", "\\emptyset").strip()


def _equal(left: str, right: str) -> bool:
    """Returns whether two expressions mean the same; False for what does not pass the filter or cannot be compared.

    Raises MemoryError, which is the child's limit and has a verdict of its own.
    """
    left, right = _without_counts(left, right)
    if not is_tame(left) or not is_tame(right):
        return False
    left, right = _without_twins(left, right)
    try:
        one, other = _parse(left), _parse(right)
        return bool(verify(one, other, timeout_seconds=None, raise_on_error=True)) and _is_close(one[0], other[0])
    except MemoryError:
        raise
    except Exception:  # the library raises what it likes on expressions that have no value, or that it cannot read
        return False


def _without_counts(*sides: str) -> list[str]:
    """Returns expressions with the values of small factorials and binomial coefficients, and a letter, the same in all,
    for those of letters: the filter lets neither through."""
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
    """Returns expressions in which no letter stands both as a capital and as a small one, and none is T: the library
    makes r of R, and drops an exponent T."""
    found = {name for side in sides for name in _LETTER.findall(side)}
    spare = iter([letter for letter in _SPARE if not found & {letter, letter.upper()}])
    twins = [name for name in sorted(found) if name == "T" or (name != name.lower() and name.lower() in found)]
    other = {name: next(spare, name) for name in twins}
    return [_LETTER.sub(lambda match: other.get(match[0], match[0]), side) for side in sides] if other else [*sides]


def _is_close(one: Any, other: Any) -> bool:
    """Returns whether values agree to a millionth, alone or in a list, set or tuple. The library compares decimals by
    their first six places: 0.0 would be right for every small truth. True for what has no value."""
    try:
        expected, got = _values(one), _values(other)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return True
    return len(got) == len(expected) and all(
        mine == wanted or abs(mine - wanted) <= 1e-6 * abs(wanted) for mine, wanted in zip(got, expected, strict=True)
    )


def _values(expression: Any) -> list[float]:
    """Returns its value, or those of its items in ascending order. Raises TypeError where there is none."""
    try:
        return [float(expression.evalf())]
    except (TypeError, AttributeError):
        if expression.free_symbols:
            raise TypeError("an expression with letters has no value") from None
        items = [
            item for item in expression.args if getattr(item, "is_number", False)
        ]  # an interval's switches are none
        return sorted(float(item.evalf()) for item in items)


@lru_cache(
    maxsize=1024
)  # an error is not kept: one for lack of memory must not make a ground truth unreadable for good
def _parse(latex: str) -> list[Any]:
    """Returns the expression that the library reads, in a list. Raises ValueError where it reads none."""
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


# The grammar's tables and regular expressions are built by first use, and inherited by every child forked later.
_equal("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}")
