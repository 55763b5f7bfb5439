"""Command line: `python -m dapo.inspect RUN [QUESTION]`, or `RUN [RUN ...]` with `--serve` or `--html FILE` for a page.
It reads the sample store (`dapo.report.store`) of a finished or running run, and starts neither Ray nor torch."""

import argparse
import difflib
import json
import re
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from rich.text import Text

from dapo.algorithm.fate import DROPPED
from dapo.report.store.reader import WHERE, Reader
from dapo.report.store.schema import DATABASE
from dapo.tools.inspect import findings as rules
from dapo.tools.inspect import page
from dapo.tools.inspect.findings import figures, why
from dapo.tools.inspect.serve import serve
from dapo.tools.inspect.show import around, beginning, block, cell, console, ending, table

ANSWER = ("step", "draw", "sample", "prompt", "tokens", "accuracy", "reward")  # numbers of an answer in a table

UNKNOWN, QUESTION = re.compile(r"invalid choice: '(.*)' \("), re.compile(r"'(\w+)'(?=[,)])")  # of argparse
MEASURE = re.compile(r"(pass|maj|best)@\d+")
STYLES = {"well": "bold green", "error": "bold red", "warning": "bold yellow"}
CLOCK = "%Y-%m-%d %H:%M:%S"


class _Program(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Names the nearest question for an unknown one."""
        found = UNKNOWN.search(message)
        near = difflib.get_close_matches(found[1], QUESTION.findall(message), n=1) if found else []
        super().error(f"{message}; did you mean `{near[0]}`?" if near else message)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    words = sys.argv[1:] if arguments is None else arguments
    of_page = any(word.split("=")[0] in ("--serve", "--html") for word in words)
    return parser(of_page).parse_args(words)


def parser(of_page: bool = False) -> argparse.ArgumentParser:
    """of_page: takes several runs and no question."""
    program = _Program(prog="dapo inspect", description="Shows what a run sampled and why.")
    about = "output directory of a run, or its samples.sqlite; a page takes several"
    program.add_argument("runs", type=Path, nargs="+" if of_page else 1, metavar="RUN", help=about)
    pages = program.add_mutually_exclusive_group()
    pages.add_argument("--serve", action="store_true", help="show the runs on a page that follows them")
    pages.add_argument("--html", type=Path, metavar="FILE", help="write the page as one file that needs no server")
    program.add_argument("--port", type=int, default=0, help="of `--serve`, on 127.0.0.1 (a free one)")
    program.add_argument("--wide", action="store_true", help="all columns, whatever the terminal's width")
    program.set_defaults(show=steps, last=20)
    if of_page:
        return program
    questions = program.add_subparsers(
        parser_class=argparse.ArgumentParser, dest="question", metavar="QUESTION", help="default: steps"
    )

    def question(name: str, show: Any, what: str) -> argparse.ArgumentParser:
        added = questions.add_parser(name, help=what, description=f"Shows {what}.")
        added.set_defaults(show=show)
        added.add_argument("--wide", action="store_true", default=argparse.SUPPRESS, help="all columns")
        return added

    one = question("steps", steps, "a line per step: groups, answers, seconds by phase")
    one.add_argument("--last", type=int, default=20, help="newest steps (20)")
    for name, show, what in (
        ("step", step, "the groups of a step, and why each was trained on or dropped"),
        ("prompt", prompt, "a prompt, and every visit to it"),
        ("draw", draw, "the prompt and all answers of one group"),
    ):
        question(name, show, what).add_argument("number", type=int)
    one = question("prompts", prompts, "how often each prompt was drawn, the most drawn first, with its pass rate")
    one.add_argument("--limit", type=int, default=20, help="prompts (20)")
    for kind in WHERE:
        one = question(kind, answers, f"{kind} answers")
        one.set_defaults(kind=kind)
        _bounds(one)
    one = question("search", search, "answers that hold a text")
    one.add_argument("text")
    _bounds(one)
    question("evaluations", evaluations, "held-out accuracy by step, the best marked")
    question("findings", findings, "what to look at, in figures, and the keys that change it")
    one = question("events", events, "faults, restarts, saves and resumes, the newest last")
    one.add_argument("--last", type=int, default=30, help="newest events (30)")
    return program


def _bounds(question: argparse.ArgumentParser) -> None:
    question.add_argument("--step", type=int, help="of this step; default: of all")
    question.add_argument("--limit", type=int, default=10, help="answers (10)")


def steps(store: Reader, given: argparse.Namespace) -> None:
    every = store.steps()
    names = ("step", "seconds", "generation", "update", "sync", "evaluation", "drawn", "trained", *DROPPED)
    names += ("accuracy", "length", "truncated")
    rows = [[row[name] for name in names] for row in every[max(0, len(every) - given.last) :]]
    table(f"{len(every)} steps", names, rows, numbers=len(names), wide=given.wide)


def step(store: Reader, given: argparse.Namespace) -> None:
    found = store.groups(given.number)
    if not found:
        raise ValueError(f"{store.path} has no step {given.number}")
    names = ("draw", "prompt", "accuracy", "variance", "tokens", "truncated")
    rows = [[*[row[name] for name in names], why(row), row["question"] or ""] for row in found]
    title = f"step {given.number}: {len(found)} groups"
    table(title, (*names, "why", "prompt"), rows, numbers=6, wide=given.wide, cut=beginning)


def prompt(store: Reader, given: argparse.Namespace) -> None:
    found = store.prompt(given.number)
    if found is None:
        raise ValueError(
            f"{store.path} has no prompt {given.number}: it was not drawn, or the number is of another set"
        )
    block(f"prompt {given.number}, {found['source']}", found["text"])
    block("ground truth", found["ground_truth"])
    names = ("step", "draw", "accuracy", "variance", "tokens", "longest", "truncated", "version")
    rows = [[*[row[name] for name in names], why(row)] for row in store.visits(given.number)]
    visits = f"{found['visits']} {'visit' if found['visits'] == 1 else 'visits'}"
    title = f"{visits}, {found['trained']} trained on, pass rate {found['pass_rate'] or 0.0:.3f}"
    table(title, (*names, "why"), rows, numbers=8, wide=given.wide)


def prompts(store: Reader, given: argparse.Namespace) -> None:
    names = ("prompt", "visits", "share", "trained", "pass_rate", "variance", "last_step")
    rows = [[*[row[name] for name in names], row["last_fate"]] for row in store.prompts(given.limit)]
    table("prompts by visits", (*names, "last fate"), rows, numbers=7, wide=given.wide)


def draw(store: Reader, given: argparse.Namespace) -> None:
    """Prints all answers of a group, the correct ones first."""
    found = sorted(store.group(given.number), key=lambda row: (-(row["accuracy"] or 0.0), row["sample"]))
    if not found:
        raise ValueError(f"{store.path} has no group of draw {given.number}: it went back to the stream, or runs still")
    first = found[0]
    block(f"draw {given.number}, step {first['step']}, prompt {first['prompt']}: {first['fate']}", first["question"])
    block("ground truth", first["ground_truth"])
    for row in found:
        verdict = f"accuracy {cell(row['accuracy'])}, reward {cell(row['reward'])}"
        about = f"{row['tokens']} tokens, {row['finish_reason']}, engine {row['engine']}"
        read = f", read as {row['prediction']!r}" if row["prediction"] else ""
        failure = f", {row['failure']}" if row["failure"] else ""
        block(f"sample {row['sample']}: {verdict}{failure}{read}, {about}", row["text"] or "(not kept)")


def answers(store: Reader, given: argparse.Namespace) -> None:
    found = store.answers(given.kind, given.limit, given.step)
    rows = [
        [*[row[name] for name in ANSWER], _fate(row), beginning(row["ground_truth"] or "", 16), _text(row)]
        for row in found
    ]
    names = (*ANSWER, "group", "truth", "end of the answer")
    table(f"{given.kind} answers", names, rows, numbers=len(ANSWER), wide=given.wide, cut=ending)


def _text(answer: dict[str, Any]) -> str:
    return "(not kept)" if answer["text"] is None else str(answer["text"])


def _fate(answer: dict[str, Any]) -> str:
    return f"{answer['fate']}, {answer['failure']}" if answer["failure"] else str(answer["fate"])


def search(store: Reader, given: argparse.Namespace) -> None:
    found = store.search(given.text, given.limit, given.step)
    rows = [[*[row[name] for name in ANSWER], row["fate"], row["text"]] for row in found]

    def where(text: str, letters: int) -> str:
        return around(text, given.text, letters)

    names = (*ANSWER, "group", "where")
    table(f"answers with {given.text!r}", names, rows, numbers=len(ANSWER), wide=given.wide, cut=where)


def evaluations(store: Reader, given: argparse.Namespace) -> None:
    found = store.metrics("eval/*")
    for name in (name for name in found if name.rsplit("/", 1)[-1] == "accuracy"):
        of_set = name.removesuffix("accuracy")
        shown = [of_set + rest for rest in ("accuracy", "accuracy_low", "accuracy_high")]
        shown += [other for other in found if MEASURE.fullmatch(other.removeprefix(of_set))]
        best = max(found[name].values())
        rows = [
            [step, *[found.get(each, {}).get(step) for each in shown], "best" if value == best else ""]
            for step, value in found[name].items()
        ]
        names = ("step", *[each.removeprefix(of_set) for each in shown], "")
        title = f"held-out accuracy{of_set.removeprefix('eval').rstrip('/')}"
        table(title, names, rows, numbers=len(names) - 1, wide=given.wide)
    if later := [*_evaluated(store.path.parent)]:
        names = ("file", "model", "set", "problems", "samples", "accuracy", "accuracy_low", "accuracy_high")
        table("dapo evaluate", names, later, wide=given.wide)
    if not found and not later:
        block("no evaluation", "`eval.every` and `data.val_files` say when a run evaluates, and on what.")


def _evaluated(run: Path) -> Iterator[list[object]]:
    """Yields a row per set of each file that `dapo.evaluate` has written into the run's directory."""
    for path in sorted(run.glob("evaluation_*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for one in found["summaries"]:
            average = one["estimates"][f"avg@{one['samples']}"]
            model = "/".join(Path(found["model"]).parts[-2:])
            name = "/".join(filter(None, (one["name"], one["source"])))
            yield [path.name, model, name, one["problems"], one["samples"], *map(average.get, ("value", "low", "high"))]


def findings(store: Reader, given: argparse.Namespace) -> None:
    run = figures(store)
    found = rules.findings(run)
    severity, line = rules.verdict(run, found)
    console().print(Text(line, style=STYLES.get(severity, "bold")))
    print()
    for look in found:
        block(f"{look.severity}: {look.rule}", "\n".join([look.what, *[f"  {change}" for change in look.changes]]))


def events(store: Reader, given: argparse.Namespace) -> None:
    rows = [
        [row["run"], row["step"], time.strftime(CLOCK, time.localtime(row["at"])), row["kind"], row["message"]]
        for row in store.events(given.last)
    ]
    table("events", ("start", "step", "at", "kind", "message"), rows, numbers=2, wide=given.wide)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    try:
        if given.serve:
            return serve(given.runs, given.port)
        with ExitStack() as stack:
            stores = [stack.enter_context(Reader(run)) for run in given.runs]
            if given.html is not None:
                print(page.write(stores, given.html))
            else:
                given.show(stores[0], given)
    except ValueError as error:
        sys.exit(f"dapo.inspect: {error}")
    except sqlite3.Error as error:
        file = " or ".join(str(run / DATABASE if run.is_dir() else run) for run in given.runs)
        sys.exit(
            f"dapo.inspect: {file} cannot be read ({error}); `sqlite3 {file} .recover | sqlite3 NEW` may save most"
        )


if __name__ == "__main__":
    main()
