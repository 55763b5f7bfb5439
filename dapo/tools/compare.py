"""Lays runs side by side: `python -m dapo.compare RUN RUN ...`. Results with confidence intervals and differences of
the configurations, a column per run, `-` for a missing value; Markdown where the output is no terminal. It only reads
files, also of a running run, without Ray or torch."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo.ground.console import say
from dapo.ground.table import duration, table
from dapo.report.store.reader import PHASES
from dapo.results.figures import LATEST, WINDOW, Accuracy, Difference, Point, Results, differences, results
from dapo.results.plot import AXES, draw
from dapo.results.runs import Run, read_runs
from dapo.results.summary import DRAWN, HELD_OUT, cost, difference, faults, point, share, shown, taken
from dapo.state.changes import values

LEFT_OUT = ("trainer.output_dir", "trainer.ray_address", "checkpoint.resume")  # where a run lies, not what it is
Gains = Sequence[Mapping[str, Difference]]  # by set, of each run against the first
Row = tuple[str, Callable[[Results], str]]
Rows = list[list[str]]  # the first one is the head
NAME, CELL = 30, 20  # widest first column on a terminal, narrowest other one

ROWS: tuple[Row, ...] = (
    ("steps", taken),
    ("starts", lambda run: "-" if run.starts is None else str(run.starts)),
    ("tokens generated", lambda run: shown(run.tokens_generated, ",")),
    ("tokens trained on", lambda run: shown(run.tokens_trained, ",")),
    ("goodput", lambda run: shown(run.goodput)),
    ("wall time", lambda run: duration(run.seconds["wall"]) if run.seconds["wall"] else "-"),
    ("seconds a step", lambda run: shown(run.seconds["steps"] / run.steps if run.steps else None, ".1f")),
    *((f"{phase}, share of the steps", lambda run, phase=phase: share(run, phase)) for phase in PHASES),
    *((f"{name}, last {WINDOW} steps", lambda run, name=name: shown(run.latest.get(name), ".4g")) for name in LATEST),
    ("survived", faults),
    ("cost", cost),
)


def results_table(found: Sequence[Results], gains: Gains) -> Rows:
    """Returns the table of results, with 95 % confidence intervals in brackets. Intervals of held-out accuracies are
    over problems, those of sampled groups over steps. gains: paired by problem."""
    rows = [
        *[(name, [cell(run) for run in found]) for name, cell in ROWS[:1]],
        *_accuracies(HELD_OUT, [{one.set: one for one in run.held_out} for run in found]),
        *_against_first(gains),
        *_accuracies(DRAWN, [{"": run.drawn} if run.drawn else {} for run in found]),
        *[(name, [cell(run) for run in found]) for name, cell in ROWS[1:]],
    ]
    return [["", *(run.name for run in found)], *([name, *cells] for name, cells in rows)]


def _accuracies(measure: str, by_set: Sequence[Mapping[str, Accuracy]]) -> Iterator[tuple[str, list[str]]]:
    parts: tuple[tuple[str, Callable[[Accuracy], Point]], ...] = (
        ("first", lambda one: one.first),
        ("last", lambda one: one.last),
        ("best", lambda one: one.best),
    )
    for name in dict.fromkeys(name for of in by_set for name in of):
        for part, of_one in parts:
            cells = [f"{point(of_one(of[name]))} at {of_one(of[name]).step}" if name in of else "-" for of in by_set]
            yield f"{f'{measure} {name}'.rstrip()}, {part}", cells


def _against_first(gains: Gains) -> Iterator[tuple[str, list[str]]]:
    for name in dict.fromkeys(name for of in gains for name in of):
        cells = [difference(of[name]) if name in of else "-" for of in gains]
        yield f"{f'{HELD_OUT} {name}'.rstrip()}, last − that of the first run", cells


def configuration_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the keys that differ between runs, each with its value in every run. A key that a run lacks has its
    default."""
    each = [values(dict(config)) for config in configs]
    rows = {key: [one[key] for one in each] for key in each[0] if key not in LEFT_OUT}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def differences_table(names: Sequence[str], found: Mapping[str, Sequence[Any]]) -> Rows:
    return [["key", *names], *([key, *map(_word, values)] for key, values in found.items())]


def _word(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return text.replace("\n", "⏎")


def parser() -> argparse.ArgumentParser:
    program = argparse.ArgumentParser(prog="dapo compare", description="Lays runs side by side.")
    program.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output directory of a run")
    program.add_argument("--png", type=Path, metavar="FILE", help="draw the curves over steps, tokens and seconds")
    return program


def compare(runs: Sequence[Run]) -> list[Rows]:
    """Returns the table of results, and that of the configurations' differences if there are any."""
    found = [results(run) for run in runs]
    first = runs[0].problems[-1] if runs[0].problems else {}
    gains = [{}, *[differences(first, run.problems[-1]) if run.problems else {} for run in runs[1:]]]
    differing = configuration_differences([run.config for run in runs])
    tables = [results_table(found, gains)]
    return [*tables, differences_table([run.name for run in runs], differing)] if differing else tables


def markdown(rows: Rows) -> str:
    head, *rest = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return table(head, rest)


def columns(rows: Rows, width: int) -> None:
    """Prints a table on a terminal, in parts of as many runs as fit beside each other."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Console(width=width)
    each = max(1, (width - NAME) // (CELL + 2))
    for at in range(1, len(rows[0]), each):
        part = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for number, name in enumerate([rows[0][0], *rows[0][at : at + each]]):
            part.add_column(Text(name), overflow="fold", max_width=None if number else NAME)
        for row in rows[1:]:
            part.add_row(*map(Text, [row[0], *row[at : at + each]]))
        out.print(part)
        out.print()


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the comparison, and draws it with `--png`."""
    given = parser().parse_args(arguments)
    try:
        runs = read_runs(given.runs)
        tables = compare(runs)
        if sys.stdout.isatty():
            for rows in tables:
                columns(rows, shutil.get_terminal_size().columns)
        else:
            say("\n\n".join(map(markdown, tables)))
        if len(runs) > 1 == len(tables):
            say("\nThe configurations are the same.")
        if given.png:
            draw({run.name: run.records for run in runs}, given.png, tuple(AXES))
    except (ValueError, OSError) as error:
        sys.exit(f"dapo.compare: {error}")


if __name__ == "__main__":
    main()
