"""Simulates a fleet of engines that generate draws with random lengths and verdicts. A response occupies one slot of
one engine for its number of tokens times the time per token; an engine without a free slot queues. Engines may lose
their place for a while. How draws are chosen is decided elsewhere, by the same buffer as in a real run."""

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

CHUNK = 256
LEAST_RATE = 0.01  # of mixed groups, despite drift: without any, no batch would fill


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Distribution of the draws. rate: share of draws with a mixed group, changing by `rate_drift` per 1,000 draws.
    Lengths are log-normal in tokens, truncated at `cap`. wrong_longer: factor on the length of wrong responses."""

    n: int = 16
    rate: float = 0.5
    rate_drift: float = 0.0
    median: float = 3000.0
    sigma: float = 0.9
    cap: int = 20480
    wrong_longer: float = 1.0
    seed: int = 0

    def chunk(self, version: int, chunk: int) -> "list[Attempt]":
        """Returns the draws from `chunk * CHUNK` on, as policy `version` samples them."""
        rng = np.random.default_rng((self.seed, version, chunk))
        drift = self.rate_drift * (chunk * CHUNK + np.arange(CHUNK)) / 1000
        mixed = rng.random(CHUNK) < np.clip(self.rate + drift, LEAST_RATE, 1.0)
        same = np.where(rng.random(CHUNK) < 0.5, 0, self.n)
        right = np.where(mixed, rng.integers(1, self.n, CHUNK), same)
        ranks = rng.permuted(np.tile(np.arange(self.n), (CHUNK, 1)), axis=1)
        lengths = np.exp(math.log(self.median) + self.sigma * rng.standard_normal((CHUNK, self.n)))
        is_right = ranks < right[:, None]
        lengths = np.where(is_right, lengths, lengths * self.wrong_longer)
        whole = np.clip(lengths, 1, self.cap).astype(int).tolist()
        return [Attempt(tuple(row), tuple(each)) for row, each in zip(whole, is_right.tolist(), strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Draws of a run, of n responses each, in random order: all once before any comes again."""

    n: int
    draws: "tuple[Attempt, ...]"
    seed: int = 0

    def chunk(self, version: int, chunk: int) -> "list[Attempt]":
        size, places = len(self.draws), range(chunk * CHUNK, (chunk + 1) * CHUNK)
        rounds = range(places[0] // size, places[-1] // size + 1)
        order = {number: np.random.default_rng((self.seed, number)).permutation(size) for number in rounds}
        return [self.draws[order[place // size][place % size]] for place in places]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Result of one start of a draw. lengths: of its n responses, in tokens. right: which of them are correct."""

    lengths: tuple[int, ...]
    right: tuple[bool, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_mixed(self) -> bool:
        """Whether some responses are correct and some wrong."""
        return any(self.right) and not all(self.right)


class Draws:
    """Generates lengths and verdicts by draw and policy version. As in a real run, where the version is part of the
    sampling seed, a restart at a later version gives other responses."""

    def __init__(self, workload: Workload | Recorded) -> None:
        self._workload = workload
        self._chunks: dict[tuple[int, int], list[Attempt]] = {}

    def attempt(self, index: int, version: int) -> Attempt:
        chunk, place = divmod(index, CHUNK)
        if (version, chunk) not in self._chunks:
            self._chunks[version, chunk] = self._workload.chunk(version, chunk)
        return self._chunks[version, chunk][place]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preemption:
    """Engines lose their place at random times. lost: share of an engine's time without one. back: from a loss to the
    return. notice: of a loss; meanwhile the engine takes no draw, and then others continue its responses. 0: untold,
    others repeat them."""

    lost: float = 0.0
    back: float = 0.0
    notice: float = 0.0
    seed: int = 0

    def times(self, factor: float) -> "Preemption":
        return replace(self, back=self.back * factor, notice=self.notice * factor)


ALWAYS = Preemption()  # no engine loses its place


class Left(NamedTuple):
    """A response that is not finished. tokens: that it lacks."""

    draw: int
    sample: int
    tokens: int


@dataclass(slots=True)
class Engine:
    """crowding: share of its time per token that shrinks with the number of its responses. clock: tokens of a slot so
    far, at time `since`. runs: heap of (end on `clock`, and what was left when it began here). change: when its place
    changes. end: of its next response."""

    slots: int
    crowding: float
    clock: float = 0.0
    since: float = 0.0
    runs: list[tuple[float, Left]] = field(default_factory=list)
    waits: deque[Left] = field(default_factory=deque)
    placed: bool = True
    change: float = math.inf
    end: float = math.inf

    def pace(self) -> float:
        """Time per token."""
        return 1.0 - self.crowding * (1.0 - len(self.runs) / self.slots)

    def settle(self, now: float) -> None:
        """To be called before `runs` changes."""
        self.clock, self.since = self.clock + (now - self.since) / self.pace(), now

    def fill(self) -> None:
        while self.waits and len(self.runs) < self.slots:
            left = self.waits.popleft()
            heapq.heappush(self.runs, (self.clock + left.tokens, left))

    def next_end(self) -> float:
        return self.since + (self.runs[0][0] - self.clock) * self.pace() if self.runs else math.inf

    def unfinished(self) -> list[Left]:
        """What the running responses lack now."""
        return [left._replace(tokens=math.ceil(end - self.clock - 1e-6)) for end, left in self.runs]


class Fleet:
    """Engines with slots and a queue each. Time is in tokens of one slot of a full engine."""

    def __init__(self, *, engines: int, slots: int, crowding: float = 0.0, preemption: Preemption = ALWAYS) -> None:
        self.now = 0.0
        self.busy = 0.0  # slot-time in use
        self.there = 0.0  # slot-time of engines that have a place
        self.in_flight = 0  # responses submitted and not finished
        self.repeated = 0  # tokens lost with an engine
        self._slots, self._running, self._placed = slots, 0, engines
        self._engines = [Engine(slots, crowding) for _ in range(engines)]
        self._loads = np.zeros(engines)  # responses that run or wait; inf: takes no draws
        self._homeless: list[Left] = []  # while no engine serves
        self._events: list[tuple[float, bool, int]] = []  # (time, whether a response ends, engine); maybe outdated
        self._lengths: dict[int, tuple[int, ...]] = {}  # of draws in flight
        self._left: dict[int, int] = {}  # unfinished responses of a draw
        self._made: dict[int, int] = {}  # tokens of finished responses of unfinished draws
        self._preemption, self._rng = preemption, np.random.default_rng(preemption.seed)
        for number in range(engines if preemption.lost else 0):
            self._stay(number)

    @property
    def serving(self) -> int:
        """Number of engines that take draws."""
        return int(np.isfinite(self._loads).sum())

    @property
    def next_event(self) -> float:
        """When the next response ends, or the next engine comes or goes."""
        while self._events:
            time, ends, number = self._events[0]
            if time == (self._engines[number].end if ends else self._engines[number].change):
                return time
            heapq.heappop(self._events)
        return math.inf

    def submit(self, index: int, lengths: tuple[int, ...]) -> None:
        """Sends all responses of a draw to the least loaded engine."""
        self._lengths[index], self._left[index], self._made[index] = lengths, len(lengths), 0
        self.in_flight += len(lengths)
        self._place(Left(index, sample, length) for sample, length in enumerate(lengths))

    def _place(self, responses: Iterable[Left]) -> None:
        """Those of a draw stay together."""
        for _, of_draw in groupby(responses, key=lambda left: left.draw):
            if self.serving:
                number = int(self._loads.argmin())
                self._settle(number).waits.extend(of_draw)
                self._resume(number)
            else:
                self._homeless.extend(of_draw)

    def _settle(self, number: int) -> Engine:
        """Must be called before the responses of an engine change, and `_resume` after it."""
        engine = self._engines[number]
        engine.settle(self.now)
        self._running -= len(engine.runs)
        return engine

    def _resume(self, number: int) -> None:
        engine = self._engines[number]
        engine.fill()
        if math.isfinite(self._loads[number]):
            self._loads[number] = len(engine.runs) + len(engine.waits)
        self._running += len(engine.runs)
        if (end := engine.next_end()) != engine.end:
            engine.end = end
            if engine.runs:
                heapq.heappush(self._events, (end, True, number))

    def advance(self, now: float) -> None:
        """Advances the time, at most to the next event."""
        self.busy += self._running * (now - self.now)
        self.there += self._placed * self._slots * (now - self.now)
        self.now = now

    def pause(self, duration: float) -> None:
        """Advances the time without any progress of the responses."""
        self.now += duration
        self.there += self._placed * self._slots * duration
        for engine in self._engines:
            engine.since, engine.end = engine.since + duration, engine.end + duration
        self._events = [(time + duration * ends, ends, number) for time, ends, number in self._events]
        heapq.heapify(self._events)

    def step(self) -> tuple[int, int, bool] | None:
        """Returns draw and sample of the next response that ends, and whether its draw is complete with it; None if
        instead an engine comes or goes."""
        self.advance(max(self.now, self.next_event))
        _, ends, number = heapq.heappop(self._events)
        engine = self._settle(number)
        if not ends:
            self._change(number)
            return None
        index, sample, _ = heapq.heappop(engine.runs)[1]
        engine.end = math.inf
        self._resume(number)
        self.in_flight -= 1
        self._made[index] += self._lengths[index][sample]
        self._left[index] -= 1
        complete = not self._left[index]
        if complete:
            del self._left[index], self._made[index], self._lengths[index]
        return index, sample, complete

    def _change(self, number: int) -> None:
        engine = self._engines[number]
        if not engine.placed:
            engine.placed, self._placed, self._loads[number] = True, self._placed + 1, 0
            self._stay(number)
        elif self._preemption.notice and math.isfinite(self._loads[number]):
            self._loads[number] = math.inf
            self._due(number, self._preemption.notice)
        else:
            self._lose(number)
        self._resume(number)
        if self._homeless and self.serving:
            homeless, self._homeless = self._homeless, []
            self._place(homeless)

    def _stay(self, number: int) -> None:
        plan = self._preemption
        self._due(number, max(0.0, self._rng.exponential(plan.back / plan.lost - plan.back) - plan.notice))

    def _lose(self, number: int) -> None:
        """The engine was told if it takes no draws any more."""
        engine = self._engines[number]
        left = engine.unfinished()
        if math.isfinite(self._loads[number]):
            begun = [response for _, response in engine.runs]
            self.repeated += sum(each.tokens for each in begun) - sum(each.tokens for each in left)
            left = begun
        left += engine.waits
        engine.runs.clear()
        engine.waits.clear()
        engine.placed, self._placed, self._loads[number] = False, self._placed - 1, math.inf
        self._due(number, self._preemption.back)
        self._place(sorted(left))

    def _due(self, number: int, after: float) -> None:
        self._engines[number].change = self.now + after
        heapq.heappush(self._events, (self.now + after, False, number))

    def abort(self, indices: Collection[int]) -> int:
        """Aborts these draws, running or waiting, and returns the tokens of the unfinished ones."""
        gone = {index for index in indices if index in self._left}
        left = [each for each in self._homeless if each.draw in gone]
        self._homeless = [each for each in self._homeless if each.draw not in gone]
        for number in range(len(self._engines)):
            engine = self._settle(number)
            left += [each for each in (*engine.unfinished(), *engine.waits) if each.draw in gone]
            engine.runs = [run for run in engine.runs if run[1].draw not in gone]
            heapq.heapify(engine.runs)
            engine.waits = deque(each for each in engine.waits if each.draw not in gone)
            self._resume(number)
        made = sum(self._made[index] for index in gone)
        made += sum(self._lengths[each.draw][each.sample] - each.tokens for each in left)
        self.in_flight -= sum(self._left.pop(index) for index in gone)
        for index in gone:
            del self._made[index], self._lengths[index]
        return made
