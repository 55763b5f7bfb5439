"""Simulates dapo and others on one fleet: one function each. dapo's is the buffer of a real run
(`dapo.sampling.buffer`); the others wait for a whole batch, or take what finishes first. Times are in tokens of one
slot."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dapo.sampling.buffer import DRAW_ORDER, OversamplingBuffer
from dapo.tools.simulate.fleet import ALWAYS, Attempt, Draws, Fleet, Preemption, Recorded, Workload
from dapo.types import Draw, Group, Prompt, Score

HOPELESS = 20
FACTOR = 3  # times the batch, for strategies with a fixed number of draws
NO_TOKENS = np.zeros(0, dtype=np.int32)
RIGHT, WRONG = (
    Score(accuracy=a, reward=2 * a - 1, parts={}, metrics={}, prediction="", failure="") for a in (1.0, 0.0)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A fleet and its job. batch: mixed groups per update. update, sync: duration of an update and of a weight sync.
    steps: updates to simulate. in_flight: most draws at once; 0: as many as fit. filtered: only mixed groups count.
    crowding: see `Engine`."""

    workload: Workload | Recorded
    engines: int = 16
    slots: int = 64
    batch: int = 512
    update: float = 0.0
    sync: float = 0.0
    steps: int = 10
    in_flight: int = 0
    filtered: bool = True
    crowding: float = 0.0
    preemption: Preemption = ALWAYS


def later(times: Sequence[float]) -> float:
    """Returns the mean without the first step, whose mixed rate is not known in advance."""
    return sum(times[1:]) / (len(times) - 1)


class Simulation:
    """Runs one strategy on one fleet and records the results. generation: per step, the time from the start of its
    generation to its batch. trained: draws in the order of training, per step. attempts: the last one of every
    draw; started: all, finished or not. ended: tokens of each response, and its time since the draw started; without
    the first step."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.fleet = Fleet(
            engines=scenario.engines,
            slots=scenario.slots,
            crowding=scenario.crowding,
            preemption=scenario.preemption,
        )
        self.attempts: dict[int, Attempt] = {}
        self.started: list[Attempt] = []
        self.generation: list[float] = []
        self.trained: list[tuple[int, ...]] = []
        self.ended: list[tuple[int, float]] = []
        self._draws = Draws(scenario.workload)
        self._began: dict[int, float] = {}
        self._following = 0  # the next draw of `start_next`
        self._ends = [0.0]
        self._started_tokens = 0
        self._wasted_tokens = 0
        self._generated_tokens = 0

    @property
    def version(self) -> int:
        """Number of updates done."""
        return len(self._ends) - 1

    def start(self, index: int) -> None:
        self.attempts[index] = self._draws.attempt(index, self.version)
        self.started.append(self.attempts[index])
        self._started_tokens += self.attempts[index].tokens
        self._began[index] = self.fleet.now
        self.fleet.submit(index, self.attempts[index].lengths)

    def start_next(self, count: int) -> range:
        batch = range(self._following, self._following + count)
        self._following = batch.stop
        for index in batch:
            self.start(index)
        return batch

    def step(self) -> tuple[int, int, bool] | None:
        """See `Fleet.step`. Raises ValueError if hardly a response ends before its engine is lost."""
        if self.fleet.repeated > HOPELESS * self._started_tokens:
            raise ValueError(
                f"engines are lost so often that each token is generated {HOPELESS} times; give a longer notice, a "
                "later return (for the same share they are lost less often), or a smaller share"
            )
        if (ended := self.fleet.step()) is None:
            return None
        index, sample, complete = ended
        if self.version:
            self.ended.append((self.attempts[index].lengths[sample], self.fleet.now - self._began[index]))
        if complete:
            self._generated_tokens += self.attempts[index].tokens
        return ended

    def abort(self, indices: Collection[int]) -> int:
        """Aborts these draws and returns the (wasted) tokens of the unfinished ones."""
        made = self.fleet.abort(indices)
        self._generated_tokens += made
        self._wasted_tokens += made
        return made

    def waste(self, indices: Iterable[int]) -> None:
        """Records finished draws that are not used."""
        self._wasted_tokens += sum(self.attempts[index].tokens for index in indices)

    def collected(self, trained: Sequence[int]) -> None:
        """Records that the batch of a step is full."""
        self.generation.append(self.fleet.now - self._ends[-1])
        self.trained.append(tuple(trained))

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
    def steps(self) -> list[float]:
        return [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]

    @property
    def idle(self) -> float:
        """Share of the engines' slot time without a response."""
        return 1.0 - self.fleet.busy / self.fleet.there

    @property
    def present(self) -> float:
        """Mean number of engines that have a place."""
        return self.fleet.there / (self.scenario.slots * self._ends[-1])

    @property
    def goodput(self) -> float:
        """Trained tokens over generated ones."""
        trained = sum(self.attempts[index].tokens for step in self.trained for index in step)
        return trained / (self._generated_tokens + self.fleet.repeated)

    @property
    def wasted(self) -> float:
        """Share of tokens of surplus or aborted groups, or lost with an engine; groups that are not mixed do not
        count."""
        return (self._wasted_tokens + self.fleet.repeated) / (self._generated_tokens + self.fleet.repeated)


def streaming(scenario: Scenario, *, max_staleness: int = 0, admission: str = DRAW_ORDER) -> Simulation:
    """Simulates dapo's strategy; at staleness 0 the engines wait for the update, above it they continue."""
    run = Simulation(scenario)
    n = scenario.workload.n
    buffer = OversamplingBuffer(
        train_batch_size=scenario.batch,
        max_in_flight=scenario.in_flight or scenario.engines * scenario.slots,
        filter_groups=scenario.filtered,
        admission=admission,
        max_staleness=max_staleness,
    )
    update_end = math.inf
    buffer.open()
    while run.version < scenario.steps:
        # all slots busy, and one draw waiting per engine
        room = max(1, run.fleet.serving) * (scenario.slots + n) - run.fleet.in_flight
        for index in buffer.take(max(0, room) // n):
            run.start(index)
        if update_end <= run.fleet.next_event:
            run.fleet.advance(update_end)
            run.updated()
            buffer.trained()
            buffer.serving(run.version)
            buffer.open()
            update_end = math.inf
            continue
        if (ended := run.step()) is None:
            continue
        finished, sample, complete = ended
        buffer.verdict(finished, float(run.attempts[finished].right[sample]))
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
        update_end = run.fleet.now + scenario.update
    return run


def _scored(index: int, right: Iterable[bool]) -> Group:
    prompt = Prompt(id=index, source="", messages=(), text="", token_ids=NO_TOKENS, ground_truth="", extra_info={})
    scores = tuple(RIGHT if each else WRONG for each in right)
    return Group(draw=Draw(index=index, prompt=prompt), responses=(), scores=scores)


def barrier(scenario: Scenario) -> Simulation:
    """Waits for `FACTOR` times the batch, trains on the first mixed groups and drops the rest; repeats if too few."""
    run = Simulation(scenario)
    for _ in range(scenario.steps):
        mixed: list[int] = []
        while len(mixed) < scenario.batch:
            started = run.start_next(FACTOR * scenario.batch)
            while run.fleet.in_flight:
                run.step()
            mixed += [index for index in started if run.attempts[index].is_mixed]
        run.waste(range(mixed[scenario.batch - 1] + 1, started.stop))
        run.train(mixed[: scenario.batch])
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
            ended = run.step()
            if ended is None or not ended[2]:
                continue
            finished = ended[0]
            running.remove(finished)
            if run.attempts[finished].is_mixed:
                mixed.append(finished)
        run.abort(running)
        run.train(mixed)
    return run
