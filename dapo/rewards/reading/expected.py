"""Parses the tests of a programming problem and compares a program's results with the expected ones. The results are
adversarial; none of them makes the comparison raise."""

import json
import math
from dataclasses import dataclass
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-9  # tolerances of decimal fractions


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTest:
    """One test. stdin: input of the program. function, arguments: the call to make instead; function "": none.
    expected: the text to write, or the value to return."""

    stdin: str
    function: str
    arguments: tuple[Any, ...]
    expected: Any


def read_tests(ground_truth: Any) -> list[CodeTest]:
    """Returns the tests of a ground truth: an object, or its JSON, with `inputs` and `outputs` of the same length.
    Without `fn_name`, each input and output is a text or a list of lines. With it, an input is the list of arguments
    and its output the return value; or both are JSON texts, with one argument per line. Raises ValueError if
    malformed."""
    truth = _json(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truth, dict) or not all(isinstance(truth.get(key), list) for key in ("inputs", "outputs")):
        raise ValueError(
            "the ground truth is no problem for `code`: it must be a JSON object with the lists `inputs` and "
            "`outputs`, and `fn_name` where a function is called"
        )
    inputs, outputs, function = truth["inputs"], truth["outputs"], truth.get("fn_name") or ""
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs; it must have as many, one at least"
        )
    pairs = zip(inputs, outputs, strict=True)
    if not function:
        return [CodeTest(stdin=_lines(a), function="", arguments=(), expected=_lines(b)) for a, b in pairs]
    return [
        CodeTest(
            stdin="", function=str(function), arguments=_arguments(a), expected=_value(b) if isinstance(a, str) else b
        )
        for a, b in pairs
    ]


def agrees(output: str, expected: str) -> bool:
    """Whether both texts have the same words, line by line. Trailing white space and trailing empty lines are ignored,
    and decimal fractions may differ by rounding."""
    got, wanted = _words(output), _words(expected)
    return len(got) == len(wanted) and all(map(_same_line, got, wanted))


def returned(result: str, expected: Any) -> bool:
    """Whether a JSON text is the expected value or, as in some data sets, the only item of an expected list."""
    try:
        value = json.loads(result)
        return _same(value, expected) or (
            isinstance(expected, list) and len(expected) == 1 and _same(value, expected[0])
        )
    except (ValueError, RecursionError):
        return False


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the ground truth is no JSON ({type(error).__name__}: {error})") from None


def _lines(value: Any) -> str:
    if isinstance(value, list):
        return "".join(f"{line}\n" for line in value)
    return str(value)


def _arguments(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return tuple(_json(line) for line in value.split("\n") if line.strip())
    return tuple(value) if isinstance(value, list) else (value,)


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:  # plain text
        return value


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().split("\n")]


def _same_line(got: list[str], wanted: list[str]) -> bool:
    return got == wanted or len(got) == len(wanted) and all(map(_same_word, got, wanted))


def _same_word(got: str, wanted: str) -> bool:
    return got == wanted or _is_fraction(wanted) and _close(_number(got), _number(wanted))


def _is_fraction(word: str) -> bool:
    return not math.isnan(_number(word)) and not word.lstrip("+-").isdecimal()


def _number(word: str) -> float:
    if not word.isascii() or "_" in word or not any(char.isdigit() for char in word):
        return math.nan
    try:
        return float(word)
    except ValueError:
        return math.nan


def _close(got: float, wanted: float) -> bool:
    return math.isclose(got, wanted, rel_tol=RELATIVE) or abs(got - wanted) < ABSOLUTE


def _same(got: Any, wanted: Any) -> bool:
    if isinstance(got, list) and isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(_same, got, wanted))
    if isinstance(got, dict) and isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(_same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, float) and isinstance(got, int | float):
        return _close(float(got), wanted) if abs(got) < 1e300 else got == wanted
    return bool(got == wanted)
