"""`python -m dapo.scale RUN_DIR engines=N`: engines join or leave a run while it goes on."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dapo.state.fleet_size import want_engines


def engines(word: str) -> int:
    name, _, number = word.partition("=")
    if name != "engines" or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} must be engines=N, with a whole number N")
    return int(number)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="dapo scale", description="Engines join or leave a run while it goes on.")
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="trainer.output_dir of the run")
    parser.add_argument("engines", type=engines, metavar="engines=N", help="how many it should have from now on")
    given = parser.parse_args(arguments)
    try:
        want_engines(given.run, given.engines)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{given.run}: {given.engines} engines are wanted; the run tells when they have joined or left")


if __name__ == "__main__":
    main()
