"""Plans a fleet on paper: `python -m dapo.simulate [--rate R ...] [--engines E] [--slots S ...] [--steps N] ...`.

Runs the real buffer (`dapo.sampling.buffer`) against simulated engines (`dapo.simulate.fleet`), next to other
strategies: a fixed 3x batch behind a barrier, refilling one for one, and taking what finishes first. Prints step time,
idle share of the engines, waste and goodput, to size a fleet before renting it. The oracle submits at once exactly the
draws up to the last one needed.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dapo.report.table import head, row
from dapo.simulate import layouts
from dapo.simulate.books import Scenario, Simulation, later
from dapo.simulate.fleet import LEAST_RATE, Workload
from dapo.simulate.strategies import barrier, first_finished, refill, refill_in_rounds, streaming

STRATEGIES: dict[str, Callable[[Scenario], Simulation]] = {
    "staleness-0": streaming,
    "staleness-1": lambda scenario: streaming(scenario, max_staleness=1),
    "staleness-2": lambda scenario: streaming(scenario, max_staleness=2),
    "barrier-3x": barrier,
    "refill": refill,
    "refill-rounds": refill_in_rounds,
    "first-finished-3x": first_finished,
}
COLUMNS = (
    *("strategy", "mixed rate", "slots", "batch full after s", "step s", "step of staleness 0", "engines idle"),
    *("wasted", "goodput", "staleness", "batch of oracle", "first batch of oracle"),
)


def strategy_cells(
    name: str, scenario: Scenario, result: Simulation, base: float, seconds_per_token: float
) -> list[str]:
    """Returns one row of the table. base: mean step time at staleness 0."""
    drift = f" {scenario.workload.rate_drift:+g}" if scenario.workload.rate_drift else ""
    return [
        name,
        f"{scenario.workload.rate:g}{drift}",
        f"{scenario.engines} x {scenario.slots}",
        f"{later(result.generation) * seconds_per_token:.0f}",
        f"{later(result.steps) * seconds_per_token:.0f}",
        f"{later(result.steps) / base:.2f}",
        f"{result.idle:.1%}",
        f"{result.wasted:.1%}",
        f"{result.goodput:.2f}",
        f"{result.staleness:.2f}",
        f"{later(result.generation) / later(result.oracle):.3f}" if result.oracle else "",
        f"{result.generation[0] / result.oracle[0]:.3f}" if result.oracle else "",
    ]


def workload(given: argparse.Namespace, **rates: Any) -> Workload:
    names = ("n", "median", "sigma", "cap", "wrong_longer", "seed")
    return Workload(**{name: getattr(given, name) for name in names}, **rates)


def scenarios(given: argparse.Namespace) -> Iterator[Scenario]:
    for slots, rate, drift in itertools.product(given.slots, given.rate, given.rate_drift):
        scenario = Scenario(
            workload=workload(given, rate=rate, rate_drift=drift),
            engines=given.engines,
            slots=slots,
            batch=given.batch,
            sync=given.sync_s * given.tokens_per_s,
            steps=given.steps,
        )
        if given.update_s is None:
            generation = later(streaming(scenario).generation)
            update = generation * given.update_share / (1 - given.update_share)
        else:
            update = given.update_s * given.tokens_per_s
        yield replace(scenario, update=update)


def _within(kind: Callable[[str], float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Returns a parser for an argparse number that rejects values outside the range."""

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text} must be {f'at least {least}' if most == math.inf else f'{least} to {most}'}"
            )
        return value

    read.__name__ = kind.__name__  # argparse says it of what is no number
    return read


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dapo.simulate", description=__doc__.splitlines()[0])
    names, count = list(STRATEGIES), _within(int, 1)
    parser.add_argument("--strategies", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--table", default="strategies", choices=TABLES, help="what to compare: %(choices)s")
    parser.add_argument(
        "--rate", type=_within(float, LEAST_RATE, 1), nargs="+", default=[0.28, 0.5, 0.9], help="shares of mixed groups"
    )
    parser.add_argument("--rate-drift", type=float, nargs="+", default=[0.0], help="changes per 1,000 draws")
    parser.add_argument("--engines", type=count, default=16)
    parser.add_argument("--slots", type=count, nargs="+", default=[64], help="responses that an engine runs at once")
    parser.add_argument("--batch", type=count, default=512, help="mixed groups per update")
    parser.add_argument("--n", type=_within(int, 2), default=16, help="responses per prompt")
    parser.add_argument("--median", type=float, default=3000.0, help="of the response length, in tokens")
    parser.add_argument("--sigma", type=float, default=0.9, help="of the log of the response length")
    parser.add_argument("--cap", type=count, default=20480, help="longest response, in tokens")
    parser.add_argument("--wrong-longer", type=float, default=1.0, help="factor on the length of wrong responses")
    parser.add_argument("--tokens-per-s", type=float, default=30.0, help="speed of one slot")
    parser.add_argument("--update-share", type=float, default=0.3, help="of the update in generation and update")
    parser.add_argument("--update-s", type=float, help="time of an update, instead of its share")
    parser.add_argument("--sync-s", type=float, default=5.0, help="time of a weight sync")
    parser.add_argument("--switch-s", type=float, default=10.0, help="of engines that sleep, or wake, on actors' GPUs")
    parser.add_argument("--gpus-per-engine", type=count, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def compare_layouts(given: argparse.Namespace) -> None:
    print(head(layouts.COLUMNS))
    for scenario in scenarios(given):
        switch = given.switch_s * given.tokens_per_s
        for cells in layouts.rows(scenario, switch, given.gpus_per_engine, 1 / given.tokens_per_s):
            print(row(cells), flush=True)


def compare_strategies(given: argparse.Namespace) -> None:
    print(head(COLUMNS))
    for scenario in scenarios(given):
        strict = streaming(scenario)
        base = later(strict.steps)
        for name in given.strategies:
            result = strict if STRATEGIES[name] is streaming else STRATEGIES[name](scenario)
            print(row(strategy_cells(name, scenario, result, base, 1 / given.tokens_per_s)), flush=True)


TABLES = {"strategies": compare_strategies, "layouts": compare_layouts}


def main() -> None:
    given = parser().parse_args()
    if given.steps < 2:
        parser().error(f"--steps ({given.steps}) must be at least 2: the first step is not counted")
    TABLES[given.table](given)


if __name__ == "__main__":
    main()
