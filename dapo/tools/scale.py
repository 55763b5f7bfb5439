"""`python -m dapo.scale RUN_DIR engines=N`: engines join or leave a run while it goes on. `--advice` tells how many;
with `--follow` the run takes that number by itself."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dapo.state.fleet_size import want_engines
from dapo.tools.simulate.__main__ import add_preemption, at_least, preemption_of
from dapo.tools.simulate.advice import advice, follow, forecasts


def engines(word: str) -> int:
    name, _, number = word.partition("=")
    if name != "engines" or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} must be engines=N, with a whole number N")
    return int(number)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dapo scale", description="Engines join or leave a run while it goes on.")
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="trainer.output_dir of the run")
    parser.add_argument("engines", type=engines, nargs="?", metavar="engines=N", help="how many from now on")
    asked = parser.add_argument_group("how many engines are best")
    asked.add_argument("--advice", action="store_true", help="simulate the run with other numbers of engines")
    take = "let the run take the best of --among, every 10 steps"
    asked.add_argument("--follow", choices=("cost", "seconds"), help=take)
    asked.add_argument("--among", type=at_least(1), nargs="+", default=[], metavar="N", help="these numbers")
    asked.add_argument("--price-per-engine-hour", type=float, metavar="X", help="otherwise the cost is in engine hours")
    asked.add_argument("--price-per-rank-hour", type=float, default=0.0, metavar="Y", help="of a training process")
    add_preemption(asked)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    given = command.parse_intermixed_args(arguments)
    if (given.engines is not None) + given.advice + (given.follow is not None) != 1:
        command.error("give one of engines=N, --advice and --follow")
    if given.follow and not given.among:
        command.error("--follow needs --among: the numbers that the run may take")
    if given.price_per_rank_hour and given.price_per_engine_hour is None:
        command.error("--price-per-rank-hour needs --price-per-engine-hour")
    try:
        if given.engines is not None:
            want_engines(given.run, given.engines)
            print(f"{given.run}: {given.engines} engines are wanted; the run tells when they have joined or left")
            return
        prices = given.price_per_engine_hour, given.price_per_rank_hour, preemption_of(given)
        if given.advice:
            print(advice(given.run, given.among, *prices))
        else:
            follow(given.run, given.follow, given.among, lambda model, among: forecasts(model, among, *prices))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
