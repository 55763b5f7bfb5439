"""Command line: `python -m dapo.compare RUN RUN ...`. It only reads files, also of a running run, without Ray or
torch."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dapo.compare.tables import comparison, configuration_differences, differences_table, results_table
from dapo.report.console import say
from dapo.results.figures import differences, results
from dapo.results.runs import Run, labels, read_run

AGAINST = ("step", "tokens", "seconds")


def parser() -> argparse.ArgumentParser:
    program = argparse.ArgumentParser(prog="python -m dapo.compare", description="Lays runs side by side.")
    program.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output directory of a run")
    program.add_argument("--png", type=Path, metavar="FILE", help="draw the curves over steps, tokens and seconds")
    program.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return program


def compare(runs: Sequence[Run], as_json: bool) -> str:
    found = [results(run) for run in runs]
    first = runs[0].problems[-1] if runs[0].problems else {}
    gains = [{}, *[differences(first, run.problems[-1]) if run.problems else {} for run in runs[1:]]]
    differing = configuration_differences([run.config for run in runs])
    if as_json:
        return json.dumps(comparison(found, gains, differing), indent=1)
    parts = [results_table(found, gains)]
    if len(runs) > 1:
        names = [run.name for run in runs]
        parts.append(differences_table(names, differing) if differing else "The configurations are the same.")
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the comparison, and draws it with `--png`."""
    given = parser().parse_args(arguments)
    try:
        runs = [read_run(folder, label) for folder, label in zip(given.runs, labels(given.runs), strict=True)]
        say(compare(runs, given.json))
        if given.png:
            from dapo.plot import draw

            draw({run.name: run.records for run in runs}, given.png, "", AGAINST)
    except (ValueError, OSError) as error:
        sys.exit(f"dapo.compare: {error}")


if __name__ == "__main__":
    main()
