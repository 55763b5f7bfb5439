"""Checks data files: is each reference answer correct for a verifier, and wrong against another row's?

Run it before training on new data: a ground truth that the verifier cannot read makes every response to it wrong. It
warns of texts that are not answers, such as proof.

    python -m dapo.rewards.selfcheck train.parquet test.jsonl --function gsm8k
    python -m dapo.rewards.selfcheck train.parquet --function my_reward.py:my_function

A function of your own is called as in a run, in a process with the default limits; without a name it is compute_score.
For `code` it runs each row's reference solution, if it has one, on its own tests and on another row's.

Files: .parquet, .json or .jsonl in a format that `data.format` knows. Exit status 0
if there are at most warnings, 1 if a row fails, 2 if a file cannot be read.
"""

import argparse
import asyncio
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.answers.answer import MAX_TRUTH_CHARS
from dapo.answers.spelling import careful_spelling
from dapo.config.paths import checked_data
from dapo.config.reward import LimitsConfig, RewardFunctionConfig
from dapo.data.layouts import AS_IT_IS
from dapo.rewards import selfcheck_code
from dapo.rewards.calling.loading import load
from dapo.rewards.calling.tried import Caller, Row, fork_server
from dapo.rewards.trial import READY, Reference, Trial, answers, named, next_different, reference, sample_of
from dapo.sandbox.program import SandboxError

FUNCTIONS = ("math", "math_verify", "gsm8k", "code")
MAX_ENDED = 3  # calls in a row that end the process of a function
MAX_SHOWN = 10  # printed failures and printed warnings per file
MAX_SHOWN_CHARS = 100  # per ground truth or answer
# A text without a digit that this many rows share may not be an answer; choices, yes and no are answers.
MANY, MANY_SHARE = 5, 0.01
_NO_ANSWER = re.compile(
    r"(?:the|see)?(?:proof|proofs|prove|proved|proven|qed|solution|above|below|(?:answer)?not(?:found|available|given|provided)"
    r"|unavailable|unknown|missing|omitted|tbd|todo|no(?:final)?answer(?:given|provided|found)?)"
)
_CHOICE = re.compile(r"\(?[A-Z]\)?|yes|no|true|false", re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dapo selfcheck", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE", help="a data file")
    parser.add_argument(
        "--function",
        default="math",
        help=f"the verifier to check: {', '.join(FUNCTIONS)}, or FILE.py[:NAME] (default: math)",
    )
    options = parser.parse_args(arguments)
    failures = 0
    for name in options.files:
        try:
            failures += _check(name, options.function)
        except (ValueError, RuntimeError, SandboxError) as error:
            print(error, file=sys.stderr)
            return 2
    return 1 if failures else 0


def _check(name: str, function: str) -> int:
    """Returns the number of failures."""
    path, _, own = function.partition(".py")
    if function == "code":
        return _check_code(name)
    if function in FUNCTIONS:
        compute_score = importlib.import_module(f"dapo.rewards.{function}").compute_score
        return _check_answers(name, list(read_references(name, mark_of(function))), compute_score)
    if path == function or own and not own.startswith(":"):
        raise ValueError(f"--function ({function}): give one of {', '.join(FUNCTIONS)}, or FILE.py[:NAME] of your own")
    return _check_own(name, RewardFunctionConfig(path=f"{path}.py", name=own.removeprefix(":") or "compute_score"))


def _check_own(name: str, spec: RewardFunctionConfig) -> int:
    if not Path(spec.path).expanduser().is_file():
        raise ValueError(f"--function ({spec.path}): there is no such file; give the path of a Python file")
    function = load(spec, section="--function")
    if function.asynchronous or function.runs_programs:
        why = "is async and may ask a server" if function.asynchronous else "runs programs of the model"
        raise ValueError(f"--function ({spec.path}): `{spec.name}` {why}, which is not tried here")
    sample, limits = sample_of(checked_data(name, key="FILE"), "FILE", AS_IT_IS), LimitsConfig()
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        server = runner.run(stack.enter_async_context(fork_server({"": spec}, limits)))
        try:
            trial = Trial(key="--function", name=named(spec), spec=spec, sample=sample)
            trial.answers = runner.run(answers(server, "", trial, limits))
            print(trial)
            _print([line if trial.broken else f"warning: {line}" for line in trial.doubts()])
            if trial.broken:
                return 1
            references = list(read_references(name, trial.answers[0].mark, whole=True))
            own = _Own(Caller(server, "", limits), runner)
            return _check_answers(name, references, own.compute_score)
        finally:
            runner.run(stack.aclose())


class _Own:
    """Calls a function of the user's own as a ready one is called."""

    def __init__(self, call: Caller, runner: asyncio.Runner) -> None:
        self._call, self._runner, self._ended = call, runner, 0

    def compute_score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, Any]:
        row = Row(source=data_source, truth=ground_truth, extra_info=extra_info)
        given = self._runner.run(self._call(row, solution_str))
        self._ended = self._ended + 1 if given.ended else 0
        if self._ended >= MAX_ENDED:
            raise RuntimeError(f"no verdict {self._ended} times in a row: {given.error}; correct the function")
        return {"acc": given.is_right, "pred": given.pred, "why": given.error or f"it gave {given.score}"}


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


def _check_answers(name: str, references: Sequence[Reference], compute_score: Callable[..., Any]) -> int:
    found = verdicts(references, compute_score)
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
            failures.append(f"row {own.row}: {_cut(own.short)} is not right against itself ({_why(verdict)})")
        other = next_different(references, index)
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
    for one in references:
        if not any(map(str.isdigit, one.short)):
            rows.setdefault(careful_spelling(one.short[:MAX_TRUTH_CHARS]).lower(), []).append(one)
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


def read_references(name: str, mark: str, *, whole: bool = False) -> Iterable[Reference]:
    """mark: their form. whole: with the rows' other columns."""
    for chunk, place, truth in selfcheck_code.ground_truths(name, what="reference answers", write="the answer there"):
        row = chunk.rest(place) if whole else {}
        rest = {"source": row["data_source"], "extra_info": row.get("extra_info") or {}} if whole else {}
        yield reference(chunk.first_row + place, truth, mark, **rest)


def mark_of(function: str) -> str:
    """Returns the form (of `dapo.rewards.trial.FORMS`) in which a ready function reads references."""
    return READY[function][0]


def _why(verdict: dict[str, Any]) -> str:
    return str(verdict["why"]) if "why" in verdict else f"read as {_cut(verdict['pred'])}"


def _verdict(compute_score: Callable[..., Any], reference: Reference, truth: str) -> dict[str, Any]:
    verdict: dict[str, Any] = compute_score(
        data_source=reference.source,
        solution_str=reference.solution,
        ground_truth=truth,
        extra_info=reference.extra_info,
    )
    return verdict


if __name__ == "__main__":
    sys.exit(main())
