"""Scores programs: the last fenced block of Python in a response is run on the tests of its problem, in the sandbox.

In: a response, and as ground truth the JSON that verl has for `prime_code`, APPS and TACO: `inputs`, `outputs`, and
`fn_name` where a function is called instead of a program run. Out: the share of tests passed, or whether all were. What
is expected never enters the sandbox, so that a program can neither read it nor write its own verdict.
"""

import json
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from dapo.rewards.reading.expected import CodeTest, agrees, read_tests, returned
from dapo.sandbox import shared
from dapo.sandbox.program import Outcome, Program

RUNS_PROGRAMS = True
LANGUAGES = ("python", "python3", "py", "")
_FENCE = re.compile(
    # Behind a tag or words it opens with a name alone.
    r"^([ \t]*|[^\n`~]+(?=[`~]{3,}+[ \t]*[\w+-]+[ \t\r]*\n))(`{3,}+|~{3,}+)[ \t]*+([\w+-]*+)[^\n`]*+\n"
    # It ends where a line begins with its fence, whatever stands behind, such as a tag; a word there opens another one.
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
    """Returns 1.0 when every test is passed, else -1.0; with `partial` the share of tests passed, 0.0 to 1.0.

    max_tests: the first so many tests count; 0: all. A test is passed by a program that ends by itself without an
    error, within its limits, and writes or returns what is expected. After a test at its time limit, or all tests
    beyond `reward.limits.sandbox.total_s`, the rest are not run and count as failed; without `partial`, after any that
    is failed. Returns score, acc (the same, 0.0 to 1.0), pred (how it went) and, for metrics, tests, passed (the
    share), no_code and time_limit (0 or 1).

    Raises ValueError for a ground truth that is not of this form, SandboxError where the sandbox failed: neither says
    anything about the solution.
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
    """Returns the last fenced block that is named Python, for one without a name behind it shows what that prints; the
    last one without a name where none is named. A block that is still open ends with the text."""
    blocks = [match for match in _FENCE.finditer(text) if match[3].lower() in LANGUAGES]
    chosen = [match for match in blocks if match[3]] or blocks
    return textwrap.dedent(chosen[-1][4]) if chosen else ""


def canaries(name: str, kwargs: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any], float]]:
    """Yields known responses, as (solution_str, ground_truth, extra_info, score), for the pool's check of itself."""
    wrong = 0.0 if kwargs.get("partial", False) else -1.0
    run = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
    call = json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
    yield "So:\n```python\nprint(sum(map(int, input().split())))\n```", run, {}, 1.0
    yield "```python\nprint('3' * 3)\n```", run, {}, wrong
    yield "```\ndef add(a, b):\n    return a + b\n```", call, {}, 1.0
    yield "```\ndef add(a, b):\n    raise SystemExit(0)\n```", call, {}, wrong


def _passed(source: str, tests: list[CodeTest], *, all_or_nothing: bool) -> tuple[int, str]:
    """Returns how many tests a program passes, and by what the first that it fails is failed, "" if none."""
    passed, spent_s, how = 0, 0.0, ""
    total_s = shared.current().limits.total_s
    for test in tests:
        outcome = shared.run(
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
    """Returns by what a test is failed, "" where it is passed."""
    if outcome.reason:
        return outcome.reason
    if outcome.exit != 0:
        return f"exit status {outcome.exit}"
    if test.function:
        return "" if returned(outcome.result, test.expected) else "another result"
    return "" if agrees(outcome.stdout, str(test.expected)) else "another output"
