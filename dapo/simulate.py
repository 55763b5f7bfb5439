"""A fleet on paper: `python -m dapo.simulate [--rate R ...] [--engines E] [--slots S ...] [--steps N] ...`.

The same buffer as in a real run (`dapo.buffer`) against simulated engines (`dapo.simulation`), beside what others do: a
fixed 3x batch behind a barrier, a refill of one for one, and taking what finishes first. Prints step time, idle share
of the engines, waste and goodput, so that a person can plan a fleet before renting it.
"""

import argparse
import math
from collections.abc import Callable

from dapo.policies import barrier, first_finished, refill, refill_in_rounds, streaming
from dapo.simulated_run import Outcome, Plan
from dapo.simulation import Workload

POLICIES: dict[str, Callable[[Plan], Outcome]] = {
    "dapo, staleness 0": streaming,
    "dapo, staleness 1": lambda plan: streaming(plan, max_staleness=1),
    "dapo, staleness 2": lambda plan: streaming(plan, max_staleness=2),
    "3x barrier, surplus thrown away": barrier,
    "one-for-one refill": refill,
    "one-for-one refill, in rounds": refill_in_rounds,
    "3x, first finished wins": first_finished,
}
COLUMNS = ("policy", "mixed rate", "slots", "step s", "of staleness 0", "idle", "wasted", "goodput", "of oracle")


def row(name: str, plan: Plan, outcome: Outcome, seconds_per_token: float, base: float) -> list[str]:
    """One line of the table; the first step, whose mixed rate nobody knows, is left out of the times."""
    later = sum(outcome.steps[1:]) / max(1, len(outcome.steps) - 1)
    against = sum(outcome.generation[1:]) / sum(outcome.oracle[1:]) if outcome.oracle[1:] else math.nan
    return [
        name,
        f"{plan.workload.rate:g}",
        f"{plan.engines} x {plan.slots}",
        f"{later * seconds_per_token:.0f}",
        f"{later / base if base else 1.0:.2f}",
        f"{outcome.idle:.1%}",
        f"{outcome.wasted:.1%}",
        f"{outcome.goodput:.2f}",
        "" if math.isnan(against) else f"{against:.3f}",
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m dapo.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, nargs="+", default=[0.28, 0.5, 0.9], help="share of mixed groups")
    parser.add_argument("--rate-drift", type=float, default=0.0, help="change of the rate per 1,000 draws")
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--slots", type=int, nargs="+", default=[64], help="responses that an engine runs at once")
    parser.add_argument("--batch", type=int, default=512, help="mixed groups per update")
    parser.add_argument("--n", type=int, default=16, help="responses per prompt")
    parser.add_argument("--median", type=float, default=3000.0, help="of the response length, in tokens")
    parser.add_argument("--sigma", type=float, default=0.9, help="of the log of the response length")
    parser.add_argument("--cap", type=int, default=20480, help="longest response, in tokens")
    parser.add_argument("--tokens-per-s", type=float, default=30.0, help="speed of one slot")
    parser.add_argument("--update-s", type=float, default=0.0, help="time of an update")
    parser.add_argument("--sync-s", type=float, default=0.0, help="time of a weight sync")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    speed = given.tokens_per_s
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for slots in given.slots:
        for rate in given.rate:
            workload = Workload(
                n=given.n,
                rate=rate,
                rate_drift=given.rate_drift,
                median=given.median,
                sigma=given.sigma,
                cap=given.cap,
                seed=given.seed,
            )
            plan = Plan(
                workload=workload,
                engines=given.engines,
                slots=slots,
                batch=given.batch,
                update=given.update_s * speed,
                sync=given.sync_s * speed,
                steps=given.steps,
            )
            base = 0.0
            for name, policy in POLICIES.items():
                outcome = policy(plan)
                base = base or sum(outcome.steps[1:]) / max(1, len(outcome.steps) - 1)
                print("| " + " | ".join(row(name, plan, outcome, 1 / speed, base)) + " |", flush=True)


if __name__ == "__main__":
    main()
