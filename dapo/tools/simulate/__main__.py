"""Plans a fleet on paper: `python -m dapo.simulate [--rate R ...] [--engines E] [--slots S ...] [--steps N] ...`.

Runs the real buffer (`dapo.sampling.buffer`) against simulated engines (`dapo.tools.simulate.fleet`), next to other
strategies: a fixed 3x batch behind a barrier, refilling one for one, and taking what finishes first. Prints step time,
idle share of the engines, waste and goodput, to size a fleet before renting it. The oracle submits at once exactly the
draws up to the last one needed.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from dapo.ground.table import head, row
from dapo.sampling.lending import Lending
from dapo.tools.simulate.fleet import LEAST_RATE, Workload
from dapo.tools.simulate.strategies import (
    Scenario,
    Simulation,
    barrier,
    first_finished,
    later,
    refill,
    refill_in_rounds,
    streaming,
)

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
LAYOUT_COLUMNS = (
    *("layout", "GPUs", "staleness", "mixed rate", "step s", "engines' GPUs idle", "actors' GPUs idle", "wasted"),
)


def scenarios(given: argparse.Namespace) -> Iterator[Scenario]:
    shared = {name: getattr(given, name) for name in ("n", "median", "sigma", "cap", "wrong_longer", "seed")}
    for slots, rate, drift in itertools.product(given.slots, given.rate, given.rate_drift):
        scenario = Scenario(
            workload=Workload(**shared, rate=rate, rate_drift=drift),
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


def compare_strategies(given: argparse.Namespace) -> Iterator[list[str]]:
    for scenario in scenarios(given):
        work = scenario.workload
        strict = streaming(scenario)
        for name in given.strategies:
            run = strict if STRATEGIES[name] is streaming else STRATEGIES[name](scenario)
            generation, step, oracle = later(run.generation), later(run.steps), run.oracle
            yield [
                name,
                f"{work.rate:g}" + (f" {work.rate_drift:+g}" if work.rate_drift else ""),
                f"{scenario.engines} x {scenario.slots}",
                f"{generation / given.tokens_per_s:.0f}",
                f"{step / given.tokens_per_s:.0f}",
                f"{step / later(strict.steps):.2f}",
                f"{run.idle:.1%}",
                f"{run.wasted:.1%}",
                f"{run.goodput:.2f}",
                f"{run.staleness:.2f}",
                f"{generation / later(oracle):.3f}" if oracle else "",
                f"{run.generation[0] / oracle[0]:.3f}" if oracle else "",
            ]


def compare_layouts(given: argparse.Namespace) -> Iterator[list[str]]:
    """Compares two pools, one time-shared pool, and two pools of which one lends. Both pools have the same number of
    GPUs; an update on all of them is assumed to take half as long."""
    half, switch = given.engines * given.gpus_per_engine, given.switch_s * given.tokens_per_s

    def cells(name: str, gpus: str, staleness: int, run: Simulation, idle: tuple[float, float]) -> list[str]:
        step = f"{later(run.steps) / given.tokens_per_s:.0f}"
        shares = [f"{share:.1%}" for share in idle]
        return [name, gpus, f"{staleness}", f"{run.scenario.workload.rate:g}", step, *shares, f"{run.wasted:.2%}"]

    def training(run: Simulation, update: float) -> float:
        return update * run.version / sum(run.steps)

    for scenario in scenarios(given):
        slots, update = scenario.engines * scenario.slots, scenario.update
        for staleness in (0, 1):
            run = streaming(scenario, max_staleness=staleness)
            yield cells("separate", f"{half}+{half}", staleness, run, (run.idle, 1.0 - training(run, update)))
        run = streaming(replace(scenario, engines=2 * scenario.engines, update=update / 2 + 2 * switch))
        idle = run.idle - training(run, update / 2)
        yield cells("time-shared", f"{2 * half}", 0, run, (idle, idle))
        lending = Lending(own=slots, lent=slots, wake_s=switch, sleep_s=switch)
        for staleness in (0, 1):
            run = streaming(scenario, max_staleness=staleness, lending=lending)
            idle = 1.0 - training(run, update) - run.lent
            yield cells("lending", f"{half}+{half}", staleness, run, (run.idle, idle))


TABLES = {"strategies": (COLUMNS, compare_strategies), "layouts": (LAYOUT_COLUMNS, compare_layouts)}


def _within(kind: Callable[[str], float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Returns a parser for an argparse number that rejects values outside the range."""

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least:g} and at most {most:g}")
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
    parser.add_argument("--steps", type=_within(int, 2), default=20, help="the first one is not counted")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    given = parser().parse_args()
    columns, rows = TABLES[given.table]
    print(head(columns))
    for cells in rows(given):
        print(row(cells), flush=True)


if __name__ == "__main__":
    main()
