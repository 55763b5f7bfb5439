"""A fleet on paper: `python -m dapo.simulate [--rate R ...] [--engines E] [--slots S ...] [--steps N] ...`.

The same buffer as in a real run (`dapo.buffer`) against simulated engines (`dapo.simulation`), beside what others do: a
fixed 3x batch behind a barrier, a refill of one for one, and taking what finishes first. Prints step time, idle share
of the engines, waste and goodput, so that a person can plan a fleet before renting it.
"""

import argparse
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from dapo.buffer import COMPLETION, DRAW_ORDER, OversamplingBuffer
from dapo.simulation import Draws, Fleet, Workload
from dapo.types import Draw, Group, Prompt, Score

NO_TOKENS = np.zeros(0, dtype=np.int32)
RIGHT, WRONG = (Score(accuracy=a, reward=2 * a - 1, parts={}, prediction="") for a in (1.0, 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A fleet and its job. batch: mixed groups per update. update, sync: time of an update and of a weight sync, in
    tokens of one slot. steps: updates to simulate."""

    workload: Workload
    engines: int = 16
    slots: int = 64
    batch: int = 512
    update: float = 0.0
    sync: float = 0.0
    steps: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a policy. Times in tokens of one slot, per step where not said otherwise.

    steps: time from update to update. generation: time from the start of a step's generation to its batch. oracle: the
    same for exactly the draws that the step used, all submitted at once (only where a step stands alone). idle: share
    of slot time. goodput: trained tokens over generated ones. wasted: tokens generated for nothing (surplus, aborted)
    over generated ones; a group that is not mixed is no waste of the policy's. staleness: mean over groups.
    trained: draws in the order of training, per step.
    """

    steps: tuple[float, ...]
    generation: tuple[float, ...]
    oracle: tuple[float, ...]
    idle: float
    goodput: float
    wasted: float
    staleness: float
    trained: tuple[tuple[int, ...], ...]


def oracle(plan: Plan, draws: Draws, indices: Iterable[int]) -> float:
    """Time to generate these draws, all submitted at once."""
    fleet = Fleet(draws, engines=plan.engines, slots=plan.slots)
    for index in indices:
        fleet.submit(index)
    while fleet.in_flight:
        fleet.step()
    return fleet.now


class Run:
    """One policy on one fleet: the clock, the books, and what all policies share. The engines stand still while they
    load weights (`sync`), so that real time is the fleet's time plus all pauses."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.draws = Draws(plan.workload)
        self.fleet = Fleet(self.draws, engines=plan.engines, slots=plan.slots)
        self.pauses = 0.0
        self.began = 0.0
        self.generated = self.wasted = self.kept = 0
        self.ends: list[float] = []
        self.generation: list[float] = []
        self.trained: list[tuple[int, ...]] = []
        self.used: list[range] = []
        self.staleness: list[int] = []

    @property
    def now(self) -> float:
        """Real time."""
        return self.fleet.now + self.pauses

    def room(self) -> int:
        """Draws that may start now: all slots busy, and one draw waiting per engine."""
        n = self.plan.workload.n
        return (self.fleet.capacity + self.plan.engines * n - self.fleet.in_flight) // n

    def group(self, index: int) -> Group:
        """The scored group of a finished draw."""
        prompt = Prompt(id=index, source="", text="", token_ids=NO_TOKENS, ground_truth="", extra_info={})
        scores = tuple(RIGHT if correct else WRONG for correct in self.draws.correct[index])
        return Group(draw=Draw(index=index, epoch=0, prompt=prompt), responses=(), scores=scores)

    def closed(self, trained: tuple[int, ...]) -> None:
        """A batch is complete."""
        self.generation.append(self.now - self.began)
        self.trained.append(trained)
        self.kept += sum(self.draws.tokens(index) for index in trained)

    def updated(self) -> None:
        """The update is done, and the engines have its weights."""
        self.pauses += self.plan.sync
        self.ends.append(self.now)
        self.began = self.now

    def outcome(self, oracles: tuple[float, ...] = ()) -> Outcome:
        """The books."""
        steps = tuple(end - start for start, end in zip([0.0, *self.ends], self.ends, strict=False))
        return Outcome(
            steps=steps,
            generation=tuple(self.generation),
            oracle=oracles,
            idle=1.0 - self.fleet.busy / (self.fleet.capacity * self.ends[-1]),
            goodput=self.kept / self.generated,
            wasted=self.wasted / self.generated,
            staleness=sum(self.staleness) / max(1, len(self.staleness)),
            trained=tuple(self.trained),
        )


def streaming(plan: Plan, *, max_staleness: int = 0, admission: str = DRAW_ORDER) -> Outcome:
    """dapo's policy; at staleness 0 the engines wait for the update, above it they go on."""
    run = Run(plan)
    fleet = run.fleet
    buffer = OversamplingBuffer(
        train_batch_size=plan.batch,
        max_in_flight=fleet.capacity,  # draws: `room` is the bound
        admission=admission,
        max_staleness=max_staleness,
    )
    started: dict[int, int] = {}
    oracles = []
    update_end = math.inf
    buffer.open(0)
    while len(run.ends) < plan.steps:
        for index in buffer.take(run.room()):
            started[index] = buffer.version
            fleet.submit(index)
        if update_end <= fleet.next_end + run.pauses:
            fleet.advance(update_end - run.pauses)
            run.updated()
            buffer.open(buffer.version + 1)
            update_end = math.inf
            continue
        finished = fleet.step()
        if finished is None:
            continue
        buffer.generated(finished, run.draws.tokens(finished))
        buffer.add(run.group(finished))
        if not buffer.collecting or not buffer.full:
            continue
        collected = buffer.close()
        buffer.ledger.aborted(fleet.abort(collected.returned))
        trained = tuple(group.draw.index for group in collected.groups)
        run.staleness += [buffer.version - started[index] for index in trained]
        run.closed(trained)
        if max_staleness == 0 and admission == DRAW_ORDER:
            oracles.append(oracle(plan, run.draws, range(collected.drawn[0].draw.index, buffer.cursor)))
        update_end = run.now + plan.update
    run.generated = buffer.ledger.tokens["generated"]
    run.wasted = buffer.ledger.tokens["aborted"]
    return run.outcome(tuple(oracles))


def barrier(plan: Plan, factor: int = 3) -> Outcome:
    """A fixed multiple of the batch, all of it waited for; the first mixed groups are trained on, the rest thrown away.
    Too few: the same again."""
    run = Run(plan)
    first = 0
    for _ in range(plan.steps):
        mixed: list[int] = []
        last = first
        while len(mixed) < plan.batch:
            batch = range(last, last + factor * plan.batch)
            for index in batch:
                run.fleet.submit(index)
            while run.fleet.in_flight:
                run.fleet.step()
            last = batch.stop
            mixed += [index for index in batch if run.draws.is_mixed(index)]
        run.closed(tuple(mixed[: plan.batch]))
        run.generated += sum(run.draws.tokens(index) for index in range(first, last))
        run.wasted += sum(run.draws.tokens(index) for index in range(mixed[plan.batch - 1] + 1, last))
        first = last
        run.fleet.advance(run.fleet.now + plan.update)
        run.updated()
    return run.outcome()


def refill(plan: Plan) -> Outcome:
    """As many draws as groups are missing; each that turns out useless is replaced by one more."""
    run = Run(plan)
    following = 0
    for _ in range(plan.steps):
        first = following
        mixed: list[int] = []
        waiting = deque(range(following, following + plan.batch))
        following += plan.batch
        while len(mixed) < plan.batch:
            while waiting and run.room() > 0:
                run.fleet.submit(waiting.popleft())
            finished = run.fleet.step()
            if finished is None:
                continue
            if run.draws.is_mixed(finished):
                mixed.append(finished)
            else:
                waiting.append(following)
                following += 1
        run.closed(tuple(mixed))
        run.generated += sum(run.draws.tokens(index) for index in range(first, following))
        run.fleet.advance(run.fleet.now + plan.update)
        run.updated()
    return run.outcome()


POLICIES: dict[str, Callable[[Plan], Outcome]] = {
    "dapo, staleness 0": streaming,
    "dapo, staleness 1": lambda plan: streaming(plan, max_staleness=1),
    "dapo, staleness 2": lambda plan: streaming(plan, max_staleness=2),
    "3x barrier, surplus thrown away": barrier,
    "one-for-one refill": refill,
    "first finished wins": lambda plan: streaming(plan, admission=COMPLETION),
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
