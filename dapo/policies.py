"""What dapo and others do on a simulated fleet: one function per policy, a plan in, what came of it out.

dapo's policy is the buffer of a real run (`dapo.buffer`); the others are a fixed multiple of the batch behind a
barrier, and a refill of one for one. The fleet is `dapo.simulation`'s.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dapo.buffer import DRAW_ORDER, OversamplingBuffer
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
    trained: draws in the order of training, per step. started: every draw that ever started, in that order.
    """

    steps: tuple[float, ...]
    generation: tuple[float, ...]
    oracle: tuple[float, ...]
    idle: float
    goodput: float
    wasted: float
    staleness: float
    trained: tuple[tuple[int, ...], ...]
    started: tuple[int, ...]


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
        self.started: dict[int, None] = {}

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
            started=tuple(self.started),
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
            run.started[index] = None
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


def first_finished(plan: Plan, factor: int = 3) -> Outcome:
    """A fixed multiple of the batch at once; the mixed groups that finish first are trained on, the rest is cut off.
    Too few: the same again."""
    run = Run(plan)
    following = 0
    for _ in range(plan.steps):
        mixed: list[int] = []
        running: set[int] = set()
        while len(mixed) < plan.batch:
            if not running:
                running = set(range(following, following + factor * plan.batch))
                following += factor * plan.batch
                for index in sorted(running):
                    run.started[index] = None
                    run.fleet.submit(index)
            finished = run.fleet.step()
            if finished is None:
                continue
            running.remove(finished)
            run.generated += run.draws.tokens(finished)
            if run.draws.is_mixed(finished):
                mixed.append(finished)
        run.closed(tuple(mixed))
        partial = run.fleet.abort(running)
        run.generated += partial
        run.wasted += partial
        run.fleet.advance(run.fleet.now + plan.update)
        run.updated()
    return run.outcome()
