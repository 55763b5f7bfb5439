"""Bookkeeping of one strategy on one simulated fleet: requests, the clock, and results. `dapo.simulate.strategies`
decides what to start and when to train; `dapo.simulate.fleet` is the fleet."""

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dapo.simulate.fleet import Attempt, Draws, Ended, Fleet, Workload
from dapo.types import Draw, Group, Prompt, Score

NO_TOKENS = np.zeros(0, dtype=np.int32)
RIGHT, WRONG = (
    Score(accuracy=a, reward=2 * a - 1, parts={}, metrics={}, prediction="", failure="") for a in (1.0, 0.0)
)


def prompt(number: int) -> Prompt:
    return Prompt(id=number, source="", messages=(), text="", token_ids=NO_TOKENS, ground_truth="", extra_info={})


def scored(draw: Draw, right: Iterable[bool]) -> Group:
    return Group(draw=draw, responses=(), scores=tuple(RIGHT if each else WRONG for each in right))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A fleet and its job. batch: mixed groups per update. update, sync: duration of an update and of a weight sync, in
    tokens of one slot. steps: updates to simulate."""

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
    """Runs one strategy on one fleet and records the results. Times are in tokens of one slot.

    The engines pause while they load weights (`sync`), so real time is the fleet's time plus all pauses.
    generation: per step, the time from the start of its generation to its batch. `oracle` and `work` treat each step
    alone, after the run. trained: draws in the order of training, per step. trained_lengths, mixed_lengths: mean
    response length of every group trained on, and of every mixed one that was ever started, finished or not.
    """

    def __init__(self, scenario: Scenario, *, lent: int = 0) -> None:
        """lent: engines on the actors' GPUs, which sleep at first."""
        self.scenario = scenario
        self.draws = Draws(scenario.workload)
        self.fleet = Fleet(engines=scenario.engines, slots=scenario.slots, lent=lent)
        self.version = 0  # updates done
        self.attempts: dict[int, Attempt] = {}  # the last one of every draw
        self.wasted_tokens = 0
        self.generation: list[float] = []
        self.trained: list[tuple[int, ...]] = []
        self.trained_lengths: list[float] = []
        self.mixed_lengths: list[float] = []
        self._versions: dict[int, int] = {}
        self._alone: list[tuple[Attempt, ...]] = []  # what each step used up
        self._following = 0
        self._pauses = self._began = 0.0
        self._generated_tokens = self._trained_tokens = 0
        self._ends: list[float] = []
        self._staleness: list[int] = []

    @property
    def now(self) -> float:
        return self.fleet.now + self._pauses

    @property
    def next_end(self) -> float:
        return self.fleet.next_end + self._pauses

    def let_time_pass(self, until: float) -> None:
        """Advances the clock to a time before `next_end`."""
        self.fleet.advance(until - self._pauses)

    def room(self) -> int:
        """Returns how many draws may start now: all slots busy, and one draw waiting per engine."""
        n = self.scenario.workload.n
        return (self.fleet.capacity + self.fleet.awake * n - self.fleet.in_flight) // n

    def foretold(self, index: int) -> Attempt:
        """Returns the result of a draw if it starts now."""
        return self.draws.attempt(index, self.version)

    def start(self, index: int) -> None:
        attempt = self.attempts[index] = self.foretold(index)
        self._versions[index] = self.version
        if attempt.is_mixed:
            self.mixed_lengths.append(attempt.tokens / len(attempt.lengths))
        self.fleet.submit(index, attempt.lengths)

    def start_next(self, count: int) -> range:
        batch = range(self._following, self._following + count)
        self._following = batch.stop
        for index in batch:
            self.start(index)
        return batch

    def step(self) -> Ended:
        ended = self.fleet.step()
        if ended.last:
            self._generated_tokens += self.attempts[ended.draw].tokens
        return ended

    def next_finished(self) -> int:
        while not (ended := self.step()).last:
            pass
        return ended.draw

    def abort(self, indices: Collection[int]) -> int:
        """Aborts these draws and returns the (wasted) tokens of the unfinished ones."""
        made = self.fleet.abort(indices)
        self._generated_tokens += made
        self.wasted_tokens += made
        return made

    def group(self, index: int) -> Group:
        return scored(Draw(index=index, prompt=prompt(index)), self.attempts[index].right)

    def closed(self, trained: Sequence[int]) -> None:
        self.generation.append(self.now - self._began)
        self.trained.append(tuple(trained))
        for index in trained:
            attempt = self.attempts[index]
            self._trained_tokens += attempt.tokens
            self.trained_lengths.append(attempt.tokens / len(attempt.lengths))
            self._staleness.append(self.version - self._versions[index])

    def updated(self) -> None:
        """Records that the update is done and the engines have its weights."""
        self.version += 1
        self._pauses += self.scenario.sync
        self._ends.append(self.now)
        self._began = self.now

    def update(self) -> None:
        self.fleet.advance(self.fleet.now + self.scenario.update)
        self.updated()

    def add_oracle(self, attempts: Iterable[Attempt]) -> None:
        """Records the attempts that a step used up, for `oracle` and `work`."""
        self._alone.append(tuple(attempts))

    @property
    def oracle(self) -> list[float]:
        """Per step, the time to generate what it used up, all submitted at once."""
        return [alone.now for alone in self._oracles]

    @property
    def work(self) -> list[float]:
        """Per step, the time that what it used up would take in slots that are never idle."""
        return [alone.busy / alone.capacity for alone in self._oracles]

    @functools.cached_property
    def _oracles(self) -> list[Fleet]:
        """One fleet per step that generates only its attempts. Lazy, because it costs as much as the run."""
        return [self._generated(attempts) for attempts in self._alone]

    def _generated(self, attempts: Iterable[Attempt]) -> Fleet:
        fleet = Fleet(engines=self.scenario.engines, slots=self.scenario.slots)
        for index, attempt in enumerate(attempts):
            fleet.submit(index, attempt.lengths)
        while fleet.in_flight:
            fleet.step()
        return fleet

    @property
    def steps(self) -> list[float]:
        return [end - start for start, end in zip([0.0, *self._ends], self._ends, strict=False)]

    @property
    def lent(self) -> float:
        """Busy slot time of the lent engines, as a share of the slot time of `engines` engines."""
        return self.fleet.lent_busy / (self.scenario.engines * self.scenario.slots * self._ends[-1])

    @property
    def idle(self) -> float:
        """Share of the engines' slot time without a response."""
        return 1.0 - self.fleet.busy / (self.scenario.engines * self.scenario.slots * self._ends[-1])

    @property
    def goodput(self) -> float:
        """Trained tokens over generated ones."""
        return self._trained_tokens / self._generated_tokens

    @property
    def wasted(self) -> float:
        """Share of tokens of surplus or aborted groups; groups that are not mixed do not count."""
        return self.wasted_tokens / self._generated_tokens

    @property
    def staleness(self) -> float:
        return sum(self._staleness) / len(self._staleness)
