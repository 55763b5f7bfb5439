"""Scores programs: runs the last fenced Python block of a response on the tests of its problem, in the sandbox. The
ground truth is verl's JSON for `prime_code`, APPS and TACO: `inputs`, `outputs`, and `fn_name` if a function is called
instead of running a program. The expected outputs never enter the sandbox, so a program can neither read them nor write
its own score."""

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
    if outcome.reason:
        return outcome.reason
    if outcome.exit != 0:
        return f"exit status {outcome.exit}"
    if test.function:
        return "" if returned(outcome.result, test.expected) else "another result"
    return "" if agrees(outcome.stdout, str(test.expected)) else "another output"
