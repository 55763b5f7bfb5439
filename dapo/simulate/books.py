"""Keeps the books of one strategy on one simulated fleet: what was asked for, the clock, and what came of it.

In: a `Scenario`. Out: a `StrategyResult`. `dapo.simulate.strategies` decides what to start and when to train; the
fleet is `dapo.simulate.fleet`'s.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dapo.simulate.fleet import Attempt, Draws, Fleet, Workload
from dapo.types import Draw, Group, Prompt, Score

NO_TOKENS = np.zeros(0, dtype=np.int32)
RIGHT, WRONG = (
    Score(accuracy=a, reward=2 * a - 1, parts={}, metrics={}, prediction="", failure="") for a in (1.0, 0.0)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Describes a fleet and its job. batch: mixed groups per update. update, sync: time of an update and of a weight
    sync, in tokens of one slot. steps: updates to simulate."""

    workload: Workload
    engines: int = 16
    slots: int = 64
    batch: int = 512
    update: float = 0.0
    sync: float = 0.0
    steps: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyResult:
    """Holds what came of a strategy. Times in tokens of one slot, per step where not said otherwise.

    steps: time from update to update. generation: time from the start of a step's generation to its batch. oracle: the
    same for exactly the draws that the step used, all submitted at once (only where a step stands alone). idle: share
    of slot time. goodput: trained tokens over generated ones. wasted: tokens generated for nothing (surplus, aborted)
    over generated ones; a group that is not mixed is no waste of the policy's. staleness: mean over groups.
    trained: draws in the order of training, per step. trained_lengths, mixed_lengths: mean response length of every
    group trained on, and of every mixed one that ever started, finished or not.
    """

    steps: tuple[float, ...]
    generation: tuple[float, ...]
    oracle: tuple[float, ...]
    idle: float
    goodput: float
    wasted: float
    staleness: float
    trained: tuple[tuple[int, ...], ...]
    trained_lengths: tuple[float, ...]
    mixed_lengths: tuple[float, ...]


def oracle(scenario: Scenario, attempts: Iterable[Attempt]) -> float:
    """Returns the time to generate these attempts, all submitted at once."""
    fleet = Fleet(engines=scenario.engines, slots=scenario.slots)
    for index, attempt in enumerate(attempts):
        fleet.submit(index, attempt.lengths)
    while fleet.in_flight:
        fleet.step()
    return fleet.now


class Simulation:
    """Runs one strategy on one fleet: the clock, the books, and what all strategies share. The engines stand still
    while they load weights (`sync`), so that real time is the fleet's time plus all pauses."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.draws = Draws(scenario.workload)
        self.fleet = Fleet(engines=scenario.engines, slots=scenario.slots)
        self.version = 0
        self.attempts: dict[int, Attempt] = {}  # the last one of every draw
        self.versions: dict[int, int] = {}
        self.wasted = 0
        self._pauses = self._began = 0.0
        self._generated = self._kept = 0
        self._ends: list[float] = []
        self._generation: list[float] = []
        self._trained: list[tuple[int, ...]] = []
        self._staleness: list[int] = []
        self._trained_lengths: list[float] = []
        self._mixed_lengths: list[float] = []

    @property
    def now(self) -> float:
        """Returns the real time."""
        return self.fleet.now + self._pauses

    @property
    def steps(self) -> int:
        """Counts the updates done."""
        return len(self._ends)

    @property
    def next_end(self) -> float:
        """Returns when the next response ends; infinite without one."""
        return self.fleet.next_end + self._pauses

    def let_time_pass(self, until: float) -> None:
        """Advances the clock to a time before `next_end`."""
        self.fleet.advance(until - self._pauses)

    def room(self) -> int:
        """Counts the draws that may start now: all slots busy, and one draw waiting per engine."""
        n = self.scenario.workload.n
        return (self.fleet.capacity + self.scenario.engines * n - self.fleet.in_flight) // n

    def start(self, index: int) -> None:
        """Sends a draw to the fleet."""
        attempt = self.attempts[index] = self.draws.attempt(index, self.version)
        self.versions[index] = self.version
        if attempt.is_mixed:
            self._mixed_lengths.append(attempt.tokens / len(attempt.lengths))
        self.fleet.submit(index, attempt.lengths)

    def step(self) -> int | None:
        """Runs to the end of the next response and returns the draw that it completes, if it does."""
        finished = self.fleet.step()
        if finished is not None:
            self._generated += self.attempts[finished].tokens
        return finished

    def abort(self, indices: Collection[int]) -> int:
        """Ends these draws and returns the tokens that the unfinished ones had made, which are wasted."""
        made = self.fleet.abort(indices)
        self._generated += made
        self.wasted += made
        return made

    def group(self, index: int) -> Group:
        """Returns the scored group of a finished draw."""
        attempt = self.attempts[index]
        prompt = Prompt(id=index, source="", messages=(), text="", token_ids=NO_TOKENS, ground_truth="", extra_info={})
        scores = (RIGHT,) * attempt.correct + (WRONG,) * (len(attempt.lengths) - attempt.correct)
        return Group(draw=Draw(index=index, prompt=prompt), responses=(), scores=scores)

    def closed(self, trained: Sequence[int]) -> None:
        """Records that a batch is complete."""
        self._generation.append(self.now - self._began)
        self._trained.append(tuple(trained))
        for index in trained:
            attempt = self.attempts[index]
            self._kept += attempt.tokens
            self._trained_lengths.append(attempt.tokens / len(attempt.lengths))
            self._staleness.append(self.version - self.versions[index])

    def updated(self) -> None:
        """Records that the update is done and the engines have its weights."""
        self.version += 1
        self._pauses += self.scenario.sync
        self._ends.append(self.now)
        self._began = self.now

    def update(self) -> None:
        """Runs the update, while the fleet stands still."""
        self.fleet.advance(self.fleet.now + self.scenario.update)
        self.updated()

    def result(self, oracles: Sequence[float] = ()) -> StrategyResult:
        """Returns the books as a result."""
        steps = tuple(end - start for start, end in zip([0.0, *self._ends], self._ends, strict=False))
        return StrategyResult(
            steps=steps,
            generation=tuple(self._generation),
            oracle=tuple(oracles),
            idle=1.0 - self.fleet.busy / (self.fleet.capacity * self._ends[-1]),
            goodput=self._kept / self._generated,
            wasted=self.wasted / self._generated,
            staleness=sum(self._staleness) / len(self._staleness),
            trained=tuple(self._trained),
            trained_lengths=tuple(self._trained_lengths),
            mixed_lengths=tuple(self._mixed_lengths),
        )
