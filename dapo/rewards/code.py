"""Scores programs: runs the last fenced Python block of a response on the tests of its problem, in the sandbox. The
ground truth is verl's JSON for `prime_code`, APPS and TACO: `inputs`, `outputs`, and `fn_name` if a function is called
instead of running a program. The expected outputs never enter the sandbox, so a program can neither read them nor write
its own score."""

import json
import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dapo.sandbox import client
from dapo.sandbox.program import Outcome, Program

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


RUNS_PROGRAMS = True
LANGUAGES = ("python", "python3", "py", "")
_FENCE = re.compile(
    # After a tag or words on the line, a fence needs a language name.
    r"^([ \t]*|[^\n`~]+(?=[`~]{3,}+[ \t]*[\w+-]+[ \t\r]*\n))(`{3,}+|~{3,}+)[ \t]*+([\w+-]*+)[^\n`]*+\n"
    # It ends at a line that begins with the same fence, whatever follows (a tag); a word there opens a new block.
    r"(.*?)(?:^[ \t]*\2[`~]*+(?![`~\w+-])|(?=^[ \t]*\2)|\Z)",
    re.DOTALL | re.MULTILINE,
)
_TIME = ("cpu", "wall")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    *,
    partial: bool = False,
    max_tests: int = 0,
) -> dict[str, Any]:
    """Returns 1.0 if every test passes, else -1.0; with `partial` the share of tests passed, 0.0 to 1.0.

    max_tests: use only the first tests; 0: all. A test passes if the program ends by itself without an error, within
    its limits, and writes or returns the expected value. After a test at its time limit, or when all tests took more
    than `reward.limits.sandbox.total_s`, the rest count as failed without being run; without `partial`, so they do
    after any failed test. Returns score, acc (0.0 to 1.0), pred (a summary) and the metrics tests, passed (the share),
    no_code and time_limit (0 or 1).

    Raises ValueError for a malformed ground truth and SandboxError if the sandbox failed; neither is the solution's
    fault.
    """
    tests = read_tests(ground_truth)[: max_tests or None]
    source = last_block(solution_str)
    passed, how = _passed(source, tests, all_or_nothing=not partial) if source.strip() else (0, "no code")
    share = passed / len(tests)
    return {
        "score": share if partial else 1.0 if passed == len(tests) else -1.0,
        "acc": share if partial else float(passed == len(tests)),
        "pred": f"{passed} of {len(tests)} tests{how and f', then {how}'}",
        "tests": float(len(tests)),
        "passed": share,
        "no_code": float(how == "no code"),
        "time_limit": float(how in _TIME),
    }


def last_block(text: str) -> str:
    """Returns the last fenced block named Python, because an unnamed block after it usually shows its output; the last
    unnamed block if none is named. An unclosed block ends with the text."""
    blocks = [match for match in _FENCE.finditer(text) if match[3].lower() in LANGUAGES]
    chosen = [match for match in blocks if match[3]] or blocks
    return textwrap.dedent(chosen[-1][4]) if chosen else ""


def canaries(name: str, kwargs: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any], float]]:
    wrong = 0.0 if kwargs.get("partial", False) else -1.0
    run = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
    call = json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
    yield "So:\n```python\nprint(sum(map(int, input().split())))\n```", run, {}, 1.0
    yield "```python\nprint('3' * 3)\n```", run, {}, wrong
    yield "```\ndef add(a, b):\n    return a + b\n```", call, {}, 1.0
    yield "```\ndef add(a, b):\n    raise SystemExit(0)\n```", call, {}, wrong


def _passed(source: str, tests: list[CodeTest], *, all_or_nothing: bool) -> tuple[int, str]:
    """Returns the number of passed tests and the reason of the first failure, "" if none."""
    passed, spent_s, how = 0, 0.0, ""
    total_s = client.current().limits.total_s
    for test in tests:
        outcome = client.run(
            Program(source=source, stdin=test.stdin, function=test.function, arguments=test.arguments, familiar=True)
        )
        spent_s += outcome.wall_s
        failed = _failed(outcome, test)
        passed += not failed
        how = how or failed
        if failed in _TIME or failed and all_or_nothing:
            break
        if spent_s >= total_s:
            return passed, how or "wall" if test is not tests[-1] else how
    return passed, how


def _failed(outcome: Outcome, test: CodeTest) -> str:
    if outcome.reason:
        return outcome.reason
    if outcome.exit != 0:
        return f"exit status {outcome.exit}"
    if test.function:
        return "" if returned(outcome.result, test.expected) else "another result"
    return "" if agrees(outcome.stdout, str(test.expected)) else "another output"
