"""`python -m dapo.plot RUN_DIR ... --out FILE`: learning curves of runs as a PNG."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dapo.results.plot import AXES, draw, title_of
from dapo.results.runs import read_runs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="dapo plot", description="Learning curves of runs as a PNG.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="trainer.output_dir of a run")
    parser.add_argument("--out", type=Path, required=True, help="the picture to write")
    parser.add_argument("--against", nargs="+", choices=AXES, default=["step"], help="the x axes (default: step)")
    given = parser.parse_args(arguments)
    try:
        runs = read_runs(given.runs)
        draw({run.name: run.records for run in runs}, given.out, given.against, title_of(runs))
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(given.out)


if __name__ == "__main__":
    main()
