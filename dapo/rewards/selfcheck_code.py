"""`dapo.rewards.selfcheck --function code`: checks that each ground truth can be read, and that a row's reference
solution passes its own tests and fails another row's."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.data.files import Chunk, read_chunks
from dapo.data.layouts import AS_IT_IS
from dapo.data.values import shown
from dapo.rewards.code import compute_score, last_block, read_tests

# Columns of a reference solution, in the row or its `extra_info`. Of Parquet files only the latter is read.
SOLUTIONS = ("solution", "solutions", "canonical_solution", "reference_solution", "answer")


@dataclass(frozen=True, slots=True)
class Problem:
    """One row, counted from 0. truth: its tests as in the data. solution: a response, "" if the row has none. wrong:
    why the tests cannot be read, "" if they can."""

    row: int
    truth: str
    solution: str
    wrong: str


@dataclass(frozen=True, slots=True)
class Found:
    """Counts of rows: with a solution, with a passing solution, compared with another row's tests, and failing those.
    lines: one per failure."""

    solutions: int
    right: int
    compared: int
    wrong: int
    lines: list[str]


def ground_truths(name: str, *, what: str, write: str) -> Iterator[tuple[Chunk, int, str]]:
    """Yields (chunk, index in the chunk, ground truth) for each row. Raises ValueError for a file without rows and for
    a ground truth that is not a text; what, write: for these messages."""
    rows = 0
    for chunk in read_chunks(name, "FILE", AS_IT_IS):
        for place, model in enumerate(chunk.reward_models):
            truth = model.get("ground_truth") if isinstance(model, dict) else None
            if not isinstance(truth, str):
                raise ValueError(
                    f"{name}, row {chunk.first_row + place} (counted from 0): `reward_model.ground_truth` "
                    f"({shown(truth)}) must be a text; write {write}"
                )
            yield chunk, place, truth
            rows += 1
    if not rows:
        raise ValueError(f"{name} has no rows; give a file with {what}")


def read_problems(name: str) -> Iterator[Problem]:
    for chunk, place, truth in ground_truths(name, what="programming problems", write="the tests there, as JSON"):
        yield Problem(chunk.first_row + place, truth, solution_of(chunk.rest(place)), _wrong(truth))


def solution_of(row: dict[str, Any]) -> str:
    """Returns the first reference solution of a row, as a response with a Python block; "" without one."""
    extra = row.get("extra_info")
    for place in (row, extra if isinstance(extra, dict) else {}):
        for key in SOLUTIONS:
            if source := _first(place.get(key)):
                return source if last_block(source) else f"```python\n{source}\n```"
    return ""


def verdicts(problems: Sequence[Problem]) -> Found:
    """Runs every reference solution in the sandbox, on its own tests and on the next different ones. Raises
    SandboxError or ValueError if programs cannot be run here."""
    lines: list[str] = []
    solutions = right = compared = wrong = 0
    for index, own in enumerate(problems):
        if own.wrong:
            lines.append(f"row {own.row}: {own.wrong}")
            continue
        if not own.solution:
            continue
        solutions += 1
        verdict = _run(own.solution, own.truth)
        right += verdict["score"] > 0
        if verdict["score"] <= 0:
            lines.append(f"row {own.row}: the reference solution is not right on its own tests: {verdict['pred']}")
        if (other := _next_different(problems, index)) is not None:
            compared += 1
            passes = _run(own.solution, other.truth)["score"] > 0
            wrong += not passes
            if passes:
                lines.append(f"row {own.row}: the reference solution is right on the tests of row {other.row} too")
    return Found(solutions, right, compared, wrong, lines)


def summary(name: str, problems: Sequence[Problem], found: Found) -> str:
    readable = sum(not problem.wrong for problem in problems)
    return (
        f"{name}: {readable} of {len(problems)} ground truths can be read; {found.right} of {found.solutions} "
        f"reference solutions right on their own tests, {found.wrong} of {found.compared} wrong on another row's"
    )


def _wrong(truth: str) -> str:
    try:
        read_tests(truth)
    except ValueError as error:
        return str(error)
    return ""


def _first(value: Any) -> str:
    """Returns a text, or the first of a list of texts, which may itself be JSON, as in APPS."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return str(value)
    if isinstance(value, list):
        value = next((each for each in value if isinstance(each, str) and each.strip()), "")
    return value if isinstance(value, str) else ""


def _next_different(problems: Sequence[Problem], index: int) -> Problem | None:
    for step in range(1, len(problems)):
        other = problems[(index + step) % len(problems)]
        if not other.wrong and other.truth != problems[index].truth:
            return other
    return None


def _run(solution: str, truth: str) -> dict[str, Any]:
    return compute_score(data_source="selfcheck", solution_str=solution, ground_truth=truth, extra_info={})
