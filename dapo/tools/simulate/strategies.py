"""Simulates strategies of dapo and others: one function each, from a scenario to its results. dapo's policy is the
buffer of a real run (`dapo.sampling.buffer`). The others are a fixed multiple of the batch behind a barrier, refilling
one for one, and taking what finishes first. Times are in tokens of one slot."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dapo.sampling.buffer import DRAW_ORDER, OversamplingBuffer
from dapo.sampling.lending import Lending
from dapo.tools.simulate.fleet import Attempt, Draws, Fleet, Workload
from dapo.types import Draw, Group, Prompt, Score

FACTOR = 3  # times the batch, for strategies with a fixed number of draws
NO_TOKENS = np.zeros(0, dtype=np.int32)
RIGHT, WRONG = (
    Score(accuracy=a, reward=2 * a - 1, parts={}, metrics={}, prediction="", failure="") for a in (1.0, 0.0)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A fleet and its job. batch: mixed groups per update. update, sync: duration of an update and of a weight sync.
    steps: updates to simulate."""

    workload: Workload
    engines: int = 16
    slots: int = 64
    batch: int = 512
    update: float = 0.0
    sync: float = 0.0
    steps: int = 10


def later(times: Sequence[float]) -> float:
    """Returns the mean without the first step, whose mixed rate is not known in advance."""
    return sum(times[1:]) / (len(times) - 1)


class Simulation:
    """Runs one strategy on one fleet and records the results. generation: per step, the time from the start of its
    generation to its batch. trained: draws in the order of training, per step. attempts: the last one of every
    draw; started: all, finished or not."""

    def __init__(self, scenario: Scenario, *, lent: int = 0) -> None:
        """lent: engines on the actors' GPUs, which sleep at first."""
        self.scenario = scenario
        self.fleet = Fleet(engines=scenario.engines, slots=scenario.slots, lent=lent)
        self.attempts: dict[int, Attempt] = {}
        self.started: list[Attempt] = []
        self.generation: list[float] = []
        self.trained: list[tuple[int, ...]] = []
        self.wasted_tokens = 0
        self.used: list[list[Attempt]] = []  # what each step used up, for `oracle`
        self._draws = Draws(scenario.workload)
        self._versions: dict[int, int] = {}  # at which a draw started
        self._following = 0  # the next draw of `start_next`
        self._ends = [0.0]
        self._generated_tokens = 0
        self._staleness: list[int] = []

    @property
    def version(self) -> int:
        """Number of updates done."""
        return len(self._ends) - 1

    def room(self) -> int:
        """Returns how many draws may start now: all slots busy, and one draw waiting per engine."""
        n = self.scenario.workload.n
        return (self.fleet.capacity + self.fleet.awake * n - self.fleet.in_flight) // n

    def start(self, index: int) -> None:
        self.attempts[index] = self._draws.attempt(index, self.version)
        self.started.append(self.attempts[index])
        self._versions[index] = self.version
        self.fleet.submit(index, self.attempts[index].lengths)

    def start_next(self, count: int) -> range:
        batch = range(self._following, self._following + count)
        self._following = batch.stop
        for index in batch:
            self.start(index)
        return batch

    def step(self) -> tuple[int, bool]:
        """Returns the draw of the next response that ends, and whether it is complete with it."""
        index, complete = self.fleet.step()
        if complete:
            self._generated_tokens += self.attempts[index].tokens
        return index, complete

    def next_finished(self) -> int:
        while True:
            index, complete = self.step()
            if complete:
                return index

    def abort(self, indices: Collection[int]) -> int:
        """Aborts these draws and returns the (wasted) tokens of the unfinished ones."""
        made = self.fleet.abort(indices)
        self._generated_tokens += made
        self.wasted_tokens += made
        return made

    def waste(self, indices: Iterable[int]) -> None:
        """Records finished draws that are not used."""
        self.wasted_tokens += sum(self.attempts[index].tokens for index in indices)

    def collected(self, trained: Sequence[int]) -> None:
        """Records that the batch of a step is full."""
        self.generation.append(self.fleet.now - self._ends[-1])
        self.trained.append(tuple(trained))
        self._staleness += [self.version - self._versions[index] for index in trained]

    def updated(self) -> None:
        """Records that the update is done; the engines pause for the weight sync."""
        self.fleet.pause(self.scenario.sync)
        self._ends.append(self.fleet.now)

    def train(self, indices: Sequence[int]) -> None:
        """Trains on these draws while the engines wait."""
        self.collected(indices)
        self.fleet.advance(self.fleet.now + self.scenario.update)
        self.updated()

    @property
    def oracle(self) -> list[float]:
        """Per step, the time to generate what it used up, all submitted at once."""
        return [self._alone(attempts) for attempts in self.used]

    def _alone(self, attempts: Iterable[Attempt]) -> float:
        fleet = Fleet(engines=self.scenario.engines, slots=self.scenario.slots)
        for index, attempt in enumerate(attempts):
            fleet.submit(index, attempt.lengths)
        while fleet.in_flight:
            fleet.step()
        return fleet.now

    @property
    def steps(self) -> list[float]:
        return [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]

    @property
    def _slot_time(self) -> float:
        return self.scenario.engines * self.scenario.slots * self._ends[-1]

    @property
    def idle(self) -> float:
        """Share of the engines' slot time without a response."""
        return 1.0 - self.fleet.busy / self._slot_time

    @property
    def lent(self) -> float:
        """Busy slot time of the lent engines, as a share of the slot time of `engines` engines."""
        return self.fleet.lent_busy / self._slot_time

    @property
    def goodput(self) -> float:
        """Trained tokens over generated ones."""
        return sum(self.attempts[index].tokens for step in self.trained for index in step) / self._generated_tokens

    @property
    def wasted(self) -> float:
        """Share of tokens of surplus or aborted groups; groups that are not mixed do not count."""
        return self.wasted_tokens / self._generated_tokens

    @property
    def staleness(self) -> float:
        return sum(self._staleness) / len(self._staleness)


def streaming(
    scenario: Scenario, *, max_staleness: int = 0, admission: str = DRAW_ORDER, lending: Lending | None = None
) -> Simulation:
    """Simulates dapo's strategy; at staleness 0 the engines wait for the update, above it they continue. lending: as
    many additional engines, on the actors' GPUs, wake while that pays and sleep when the batch is full."""
    run = Simulation(scenario, lent=scenario.engines if lending else 0)
    fleet = run.fleet
    buffer = OversamplingBuffer(
        train_batch_size=scenario.batch,
        max_in_flight=fleet.capacity,  # draws: `room` is the bound
        admission=admission,
        max_staleness=max_staleness,
    )
    lent = False  # the engines on the actors' GPUs are awake, or wake up
    update_end = awake_at = math.inf
    buffer.open()
    while run.version < scenario.steps:
        for index in buffer.take(run.room()):
            run.start(index)
        if lending and not lent and buffer.collecting and _pays(lending, run, buffer):
            lent, awake_at = True, fleet.now + lending.wake_s
        if awake_at <= min(update_end, fleet.next_end):
            fleet.advance(awake_at)
            fleet.wake()
            awake_at = math.inf
            continue
        if update_end <= fleet.next_end:
            fleet.advance(update_end)
            run.updated()
            buffer.trained()
            buffer.serving(run.version)
            buffer.open()
            update_end = math.inf
            continue
        finished, complete = run.step()
        if not complete:
            continue
        buffer.generated(finished, run.attempts[finished].tokens)
        buffer.add(_scored(finished, run.attempts[finished].right))
        if not buffer.collecting or not buffer.full:
            continue
        collected = buffer.close()
        run.waste(set(collected.returned) - collected.unfinished)
        buffer.aborted(run.abort(collected.returned))
        run.collected([group.draw.index for group in collected.groups])
        if max_staleness == 0 and admission == DRAW_ORDER:
            run.used.append([run.attempts[group.draw.index] for group in collected.drawn])
        update_end = fleet.now + scenario.update
        if lending and lent:
            fleet.sleep()
            update_end += lending.sleep_s
            lent, awake_at = False, math.inf
    return run


def _pays(lending: Lending, run: Simulation, buffer: OversamplingBuffer) -> bool:
    """Whether to wake the lent engines for what the batch lacks by the demand estimate and the queued responses."""
    if not run.fleet.ended:
        return False
    waiting = buffer.missing * run.scenario.workload.n + run.fleet.queued
    return lending.gain_s(waiting, run.fleet.ended_tokens / run.fleet.ended) > 0


def _scored(index: int, right: Iterable[bool]) -> Group:
    prompt = Prompt(id=index, source="", messages=(), text="", token_ids=NO_TOKENS, ground_truth="", extra_info={})
    scores = tuple(RIGHT if each else WRONG for each in right)
    return Group(draw=Draw(index=index, prompt=prompt), responses=(), scores=scores)


def barrier(scenario: Scenario) -> Simulation:
    """Waits for `FACTOR` times the batch, trains on the first mixed groups and drops the rest; repeats if too few."""
    return _in_rounds(scenario, lambda missing: FACTOR * scenario.batch)


def refill_in_rounds(scenario: Scenario) -> Simulation:
    """Waits for a batch of draws; then for as many as are missing, and so on."""
    return _in_rounds(scenario, lambda missing: missing)


def _in_rounds(scenario: Scenario, draws: Callable[[int], int]) -> Simulation:
    """Waits for rounds of draws until a batch is mixed. draws: size of a round, by the number of missing groups."""
    run = Simulation(scenario)
    for _ in range(scenario.steps):
        mixed: list[int] = []
        while len(mixed) < scenario.batch:
            started = run.start_next(draws(scenario.batch - len(mixed)))
            while run.fleet.in_flight:
                run.step()
            mixed += [index for index in started if run.attempts[index].is_mixed]
        run.waste(range(mixed[scenario.batch - 1] + 1, started.stop))
        run.train(mixed[: scenario.batch])
    return run


def refill(scenario: Scenario) -> Simulation:
    """Starts a batch of draws; each useless one is replaced by one more."""
    run = Simulation(scenario)
    for _ in range(scenario.steps):
        mixed: list[int] = []
        run.start_next(scenario.batch)
        while len(mixed) < scenario.batch:
            finished = run.next_finished()
            if run.attempts[finished].is_mixed:
                mixed.append(finished)
            else:
                run.start_next(1)
        run.train(mixed)
    return run


def first_finished(scenario: Scenario) -> Simulation:
    """Starts `FACTOR` times the batch, trains on the first mixed ones to finish, aborts the rest; repeats if too
    few."""
    run = Simulation(scenario)
    for _ in range(scenario.steps):
        mixed: list[int] = []
        running: set[int] = set()
        while len(mixed) < scenario.batch:
            running = running or set(run.start_next(FACTOR * scenario.batch))
            finished = run.next_finished()
            running.remove(finished)
            if run.attempts[finished].is_mixed:
                mixed.append(finished)
        run.abort(running)
        run.train(mixed)
    return run
