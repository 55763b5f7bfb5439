"""Checks data files: does a verifier find each reference answer right, and wrong against another row's?

To run before training on new data: a ground truth that the verifier cannot read makes every response to it wrong. It
warns of an equation as ground truth, such as 7 = 11a + c, that the verifier takes for a name with a value, and of a
JSON list of several texts.

    python -m dapo.rewards.selfcheck train.parquet test.jsonl --function gsm8k

For `code` it runs each row's reference solution, where it has one, on its own tests and on another row's.

Files: .parquet, .json or .jsonl in the DAPO-Math schema, or GSM8K's own .jsonl with question and answer. Exit status 0
when all is as it should be or worth a warning, 1 when a row is not, 2 when a file cannot be read.
"""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.data.values import shown
from dapo.rewards import selfcheck_code
from dapo.rewards.reading.answer import agree, read_truth, truth_text, truth_texts
from dapo.sandbox.program import SandboxError

FUNCTIONS = ("math", "math_verify", "gsm8k", "code")
MAX_SHOWN = 10  # failures of a file that are printed, and warnings
_NAME = re.compile(
    r"[\s$\\(\[]*(?:[A-Za-z]{1,8}(?:_\{?[0-9A-Za-z]\}?)?(?:\([A-Za-z0-9, ]{1,9}\))?|\([A-Za-z, ]{1,9}\))\s*"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """Holds one row's answer. row: counted from 0. solution: what is scored. truth: as in the data. short: only its
    number or expression, to tell different truths apart."""

    row: int
    solution: str
    truth: str
    short: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the files that the command line names, prints what was found, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dapo.rewards.selfcheck", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="data in the DAPO-Math schema, or GSM8K's own .jsonl")
    parser.add_argument("--function", choices=FUNCTIONS, default="math", help="the verifier to check (default: math)")
    options = parser.parse_args(arguments)
    failures = 0
    for name in options.files:
        try:
            failures += _check_code(name) if options.function == "code" else _check_answers(name, options.function)
        except (ValueError, SandboxError) as error:
            print(error, file=sys.stderr)
            return 2
    return 1 if failures else 0


def _check_code(name: str) -> int:
    """Prints what `dapo.rewards.selfcheck_code` finds; returns failures."""
    problems = list(selfcheck_code.read_problems(name))
    found = selfcheck_code.verdicts(problems)
    print(selfcheck_code.summary(name, problems, found))
    _print(found.lines)
    return len(found.lines)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Counts references: right for themselves, compared with another one, wrong for that. lines: one per failure;
    warnings: one per equation that its right side alone meets, and per list of texts."""

    right: int
    compared: int
    wrong: int
    lines: list[str]
    warnings: list[str]


def _check_answers(name: str, function: str) -> int:
    """Prints what `verdicts` finds; returns failures."""
    references = list(read_references(name, function))
    found = verdicts(references, importlib.import_module(f"dapo.rewards.{function}").compute_score)
    print(
        f"{name}: {found.right} of {len(references)} right against themselves, {found.wrong} of {found.compared} wrong "
        "against another"
    )
    _print(found.lines)
    _print([f"warning: {line}" for line in found.warnings])
    return len(found.lines)


def _print(lines: Sequence[str]) -> None:
    for line in lines[:MAX_SHOWN]:
        print(f"  {line}")
    if len(lines) > MAX_SHOWN:
        print(f"  ... and {len(lines) - MAX_SHOWN} more")


def verdicts(references: Sequence[Reference], compute_score: Callable[..., Any]) -> Verdicts:
    """Scores every reference against its own truth and the next different one."""
    failures: list[str] = []
    warnings: list[str] = []
    compared = right = wrong = 0
    for index, own in enumerate(references):
        verdict = _verdict(compute_score, own, own.truth)
        right += verdict["acc"]
        if not verdict["acc"]:
            failures.append(f"row {own.row}: {own.short!r} is not right against itself (read as {verdict['pred']!r})")
        if half := _half(compute_score, own):
            warnings.append(
                f"row {own.row}: the ground truth {own.short!r} holds `=`, and {half!r} alone is right too; write the "
                "truth without `=`, or take a verifier that compares equations (math_verify)"
            )
        if len(truth_texts(own.truth)) > 1 and truth_text(own.truth) == own.truth:
            warnings.append(
                f"row {own.row}: the ground truth {shown(own.truth)} lists several texts that differ, and none of "
                "them alone is right; write the one answer"
            )
        other = _next_different(references, index)
        if other is not None:
            compared += 1
            verdict = _verdict(compute_score, own, other.truth)
            wrong += not verdict["acc"]
            if verdict["acc"]:
                failures.append(f"row {own.row}: {own.short!r} is right against {other.short!r} of row {other.row}")
    return Verdicts(right, compared, wrong, failures, warnings)


def read_references(name: str, function: str) -> Iterable[Reference]:
    """Yields the reference answers of a file as `function` expects them. Raises ValueError for what is none."""
    raw = _question_and_answer(Path(name))
    if raw is not None:
        for row, answer in raw:
            short = answer.rpartition("####")[2].strip()
            whole = function == "gsm8k"
            yield Reference(row, answer if whole else f"Answer: {short}", answer if whole else short, short)
        return
    for chunk, place, truth in selfcheck_code.ground_truths(name, what="reference answers", write="the answer there"):
        yield reference(chunk.first_row + place, truth, function)


def reference(row: int, truth: str, function: str) -> Reference:
    """Returns the answer that `function` must find right. truth: `reward_model.ground_truth` of a row."""
    short = truth.rpartition("####")[2].strip()
    return Reference(row, f"{'####' if function == 'gsm8k' else 'Answer:'} {short}", truth, short)


def _question_and_answer(path: Path) -> list[tuple[int, str]] | None:
    """Returns (row, answer) of a file with GSM8K's columns; None for any other, which has DAPO-Math's schema."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    answers: list[tuple[int, str]] = []
    with path.open(encoding="utf-8") as file:
        for row, line in enumerate(file):
            try:
                value = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError:
                return None  # the other reader names the line
            if isinstance(value, dict) and isinstance(value.get("answer"), str) and "question" in value:
                answers.append((row, value["answer"]))
            elif line.strip():
                return None
    return answers or None


def _half(compute_score: Callable[..., Any], own: Reference) -> str:
    """Returns the right side of an equation that is more than a value with a name, where that alone is right; or ""."""
    left, _, right = own.short.rpartition("=")
    if not left or _NAME.fullmatch(left):
        return ""
    half = right.strip(" $")
    solution = own.solution.replace(own.short, half)
    alone = Reference(own.row, solution, own.truth, half)
    return half if _verdict(compute_score, alone, own.truth)["acc"] else ""


def _next_different(references: Sequence[Reference], index: int) -> Reference | None:
    """Returns the first reference behind `index`, around the end, whose truth is another one."""
    own = read_truth(references[index].short)
    for step in range(1, len(references)):
        other = references[(index + step) % len(references)]
        if other.short != references[index].short and not agree(own, read_truth(other.short)):
            return other
    return None


def _verdict(compute_score: Callable[..., Any], reference: Reference, truth: str) -> dict[str, Any]:
    verdict: dict[str, Any] = compute_score(
        data_source="selfcheck", solution_str=reference.solution, ground_truth=truth, extra_info={}
    )
    return verdict


if __name__ == "__main__":
    sys.exit(main())
