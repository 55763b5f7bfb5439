"""Plans a fleet on paper: `python -m dapo.simulate [--rate R ...] [--engines E] [--slots S ...] [--steps N] ...`.

Runs the real buffer (`dapo.sampling.buffer`) against simulated engines (`dapo.tools.simulate.fleet`), next to waiting
for whole batches and to taking what finishes first. Prints step time, idle share of the engines, waste and goodput.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from dapo.ground.table import head, row
from dapo.tools.simulate.fleet import Preemption, Workload
from dapo.tools.simulate.strategies import Scenario, Simulation, barrier, first_finished, later, streaming

STRATEGIES: dict[str, Callable[[Scenario], Simulation]] = {
    "staleness-0": streaming,
    "staleness-1": lambda scenario: streaming(scenario, max_staleness=1),
    "staleness-2": lambda scenario: streaming(scenario, max_staleness=2),
    "barrier-3x": barrier,
    "first-finished-3x": first_finished,
}
COLUMNS = (
    *("strategy", "mixed rate", "slots", "batch full after s", "step s", "step of staleness 0", "engines idle"),
    *("wasted", "goodput"),
)


def scenarios(given: argparse.Namespace) -> Iterator[tuple[float, Scenario]]:
    shared = {name: getattr(given, name) for name in ("n", "median", "sigma", "cap", "wrong_longer", "seed")}
    for slots, rate in itertools.product(given.slots, given.rate):
        scenario = Scenario(
            workload=Workload(**shared, rate=rate),
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
        yield rate, replace(scenario, update=update, preemption=preemption_of(given).times(given.tokens_per_s))


def rows(given: argparse.Namespace) -> Iterator[list[str]]:
    for rate, scenario in scenarios(given):
        strict = streaming(scenario)
        for name in given.strategies:
            run = strict if STRATEGIES[name] is streaming else STRATEGIES[name](scenario)
            generation, step = later(run.generation), later(run.steps)
            yield [
                name,
                f"{rate:g}",
                f"{scenario.engines} x {scenario.slots}",
                f"{generation / given.tokens_per_s:.0f}",
                f"{step / given.tokens_per_s:.0f}",
                f"{step / later(strict.steps):.2f}",
                f"{run.idle:.1%}",
                f"{run.wasted:.1%}",
                f"{run.goodput:.2f}",
            ]


def at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return int(text)

    return whole


def add_preemption(parser: argparse._ActionsContainer) -> None:
    share, notice, back = _between(0, 0.9), _between(0), _between(0.1)
    parser.add_argument("--lost", type=share, default=0.0, help="share of time that an engine is preempted")
    parser.add_argument("--notice-s", type=notice, default=0.0, help="before an engine is lost; 0: so are its tokens")
    parser.add_argument("--back-s", type=back, default=60.0, help="until it is back and serves")


def preemption_of(given: argparse.Namespace) -> Preemption:
    """In seconds."""
    return Preemption(lost=given.lost, back=given.back_s, notice=given.notice_s)


def _between(least: float, most: float = math.inf) -> Callable[[str], float]:
    def number(text: str) -> float:
        if not least <= float(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} must be between {least:g} and {most:g}")
        return float(text)

    return number


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dapo simulate", description=__doc__.splitlines()[0])
    names, count = list(STRATEGIES), at_least(1)
    parser.add_argument("--strategies", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rate", type=float, nargs="+", default=[0.28, 0.5, 0.9], help="shares of mixed groups")
    parser.add_argument("--engines", type=count, default=16)
    parser.add_argument("--slots", type=count, nargs="+", default=[64], help="responses that an engine runs at once")
    parser.add_argument("--batch", type=count, default=512, help="mixed groups per update")
    parser.add_argument("--n", type=at_least(2), default=16, help="responses per prompt")
    parser.add_argument("--median", type=float, default=3000.0, help="of the response length, in tokens")
    parser.add_argument("--sigma", type=float, default=0.9, help="of the log of the response length")
    parser.add_argument("--cap", type=count, default=20480, help="longest response, in tokens")
    parser.add_argument("--wrong-longer", type=float, default=1.0, help="factor on the length of wrong responses")
    parser.add_argument("--tokens-per-s", type=float, default=30.0, help="speed of one slot")
    parser.add_argument("--update-share", type=float, default=0.3, help="of the update in generation and update")
    parser.add_argument("--update-s", type=float, help="time of an update, instead of its share")
    parser.add_argument("--sync-s", type=float, default=5.0, help="time of a weight sync")
    parser.add_argument("--steps", type=at_least(2), default=20, help="the first one is not counted")
    parser.add_argument("--seed", type=int, default=0)
    add_preemption(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    print(head(COLUMNS))
    try:
        for cells in rows(given):
            print(row(cells), flush=True)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
