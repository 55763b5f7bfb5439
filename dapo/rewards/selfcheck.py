"""Checks data files: is each reference answer correct for a verifier, and wrong against another row's?

Run it before training on new data: a ground truth that the verifier cannot read makes every response to it wrong. It
warns of texts that are not answers, such as proof.

    python -m dapo.rewards.selfcheck train.parquet test.jsonl --function gsm8k

For `code` it runs each row's reference solution, if it has one, on its own tests and on another row's.

Files: .parquet, .json or .jsonl in a format that `data.format` knows. Exit status 0
if there are at most warnings, 1 if a row fails, 2 if a file cannot be read.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.answers.answer import MAX_TRUTH_CHARS, agree, read_truth, truth_text
from dapo.answers.spelling import careful_spelling
from dapo.rewards import selfcheck_code
from dapo.sandbox.program import SandboxError

FUNCTIONS = ("math", "math_verify", "gsm8k", "code")
MAX_SHOWN = 10  # printed failures and printed warnings per file
MAX_SHOWN_CHARS = 100  # per ground truth or answer
# A text without a digit that this many rows share may not be an answer; choices, yes and no are answers.
MANY, MANY_SHARE = 5, 0.01
_NO_ANSWER = re.compile(
    r"(?:the|see)?(?:proof|proofs|prove|proved|proven|qed|solution|above|below|(?:answer)?not(?:found|available|given|provided)"
    r"|unavailable|unknown|missing|omitted|tbd|todo|no(?:final)?answer(?:given|provided|found)?)"
)
_CHOICE = re.compile(r"\(?[A-Z]\)?|yes|no|true|false", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reference:
    """The answer of one row. row: counted from 0. solution: the text to score. truth: as in the data. short: only the
    number or expression, to tell different ground truths apart."""

    row: int
    solution: str
    truth: str
    short: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dapo selfcheck", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE", help="a data file")
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
    problems = list(selfcheck_code.read_problems(name))
    found = selfcheck_code.verdicts(problems)
    print(selfcheck_code.summary(name, problems, found))
    _print(found.lines)
    return len(found.lines)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Counts of references: correct for themselves, compared with another ground truth, wrong for it. lines: one per
    failure."""

    right: int
    compared: int
    wrong: int
    lines: list[str]


def _check_answers(name: str, function: str) -> int:
    references = list(read_references(name, function))
    found = verdicts(references, importlib.import_module(f"dapo.rewards.{function}").compute_score)
    print(
        f"{name}: {found.right} of {len(references)} right against themselves, {found.wrong} of {found.compared} wrong "
        "against another"
    )
    _print(found.lines)
    _print([f"warning: {line}" for line in no_answers(references)])
    return len(found.lines)


def _print(lines: Sequence[str]) -> None:
    for line in lines[:MAX_SHOWN]:
        print(f"  {line}")
    if len(lines) > MAX_SHOWN:
        print(f"  ... and {len(lines) - MAX_SHOWN} more")


def verdicts(references: Sequence[Reference], compute_score: Callable[..., Any]) -> Verdicts:
    failures: list[str] = []
    compared = right = wrong = 0
    for index, own in enumerate(references):
        verdict = _verdict(compute_score, own, own.truth)
        right += verdict["acc"]
        if not verdict["acc"]:
            failures.append(
                f"row {own.row}: {_cut(own.short)} is not right against itself (read as {_cut(verdict['pred'])})"
            )
        other = _next_different(references, index)
        if other is not None:
            compared += 1
            verdict = _verdict(compute_score, own, other.truth)
            wrong += not verdict["acc"]
            if verdict["acc"]:
                failures.append(
                    f"row {own.row}: {_cut(own.short)} is right against {_cut(other.short)} of row {other.row}"
                )
    return Verdicts(right, compared, wrong, failures)


def no_answers(references: Sequence[Reference]) -> list[str]:
    """Returns a line per ground truth that is not an answer (`proof`), or may not be: a text without a digit that many
    rows share. A policy would learn to write it."""
    rows: dict[str, list[Reference]] = {}
    for reference in references:
        if not any(map(str.isdigit, reference.short)):
            rows.setdefault(careful_spelling(reference.short[:MAX_TRUTH_CHARS]).lower(), []).append(reference)
    lines = []
    for text, found in rows.items():
        first = found[0]
        of = f"the ground truth {_cut(first.short)} of {len(found)} of {len(references)} rows, the first {first.row},"
        if _NO_ANSWER.fullmatch(text):
            lines.append(f"{of} is no answer; leave such rows out")
        elif len(found) >= max(MANY, MANY_SHARE * len(references)) and not _CHOICE.fullmatch(text):
            lines.append(f"{of} may stand for no answer; leave such rows out if it does")
    return lines


def _cut(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "...")


def read_references(name: str, function: str) -> Iterable[Reference]:
    for chunk, place, truth in selfcheck_code.ground_truths(name, what="reference answers", write="the answer there"):
        yield reference(chunk.first_row + place, truth, function)


def reference(row: int, truth: str, function: str) -> Reference:
    """Returns a reference that `function` must score as correct. truth: `reward_model.ground_truth` of a row."""
    short = truth_text(truth).rpartition("####")[2].strip()
    return Reference(row, f"{'####' if function == 'gsm8k' else 'Answer:'} {short}", truth, short)


def _next_different(references: Sequence[Reference], index: int) -> Reference | None:
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
