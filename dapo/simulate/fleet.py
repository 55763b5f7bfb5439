"""Simulates a fleet of engines: draws with random lengths and verdicts in, events out.

A response holds one slot of one engine for as many seconds as it has tokens times the time of a token; an engine with
no free slot queues. Nothing here knows how draws are chosen: `dapo.simulate` asks the same buffer as a real run does.
"""

import heapq
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

CHUNK = 256
LEAST_RATE = 0.01  # of mixed groups, however it drifts: without any no batch would be full


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Describes what the draws are like. rate: share of draws whose group is mixed, drifting by `rate_drift` per 1,000
    draws.

    Lengths are log-normal in tokens, cut at `cap`. wrong_longer: factor on the length of wrong responses.
    """

    n: int = 16
    rate: float = 0.5
    rate_drift: float = 0.0
    median: float = 3000.0
    sigma: float = 0.9
    cap: int = 20480
    wrong_longer: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """Holds what one start of a draw gives. lengths: of its n responses, in tokens. right: which of them are."""

    lengths: tuple[int, ...]
    right: tuple[bool, ...]

    @property
    def tokens(self) -> int:
        """Counts the tokens of all responses."""
        return sum(self.lengths)

    @property
    def is_mixed(self) -> bool:
        """Says whether some responses are right and some wrong."""
        return any(self.right) and not all(self.right)


@dataclass(frozen=True, slots=True)
class Ended:
    """Says which response of which draw ended. last: the draw is complete with it."""

    draw: int
    sample: int
    last: bool


class Draws:
    """Makes lengths and verdicts by draw and policy version. As in a real run, where the version is part of the
    sampling seed, a draw that starts again at a later version gives other responses."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._chunks: dict[tuple[int, int], list[Attempt]] = {}

    def attempt(self, index: int, version: int) -> Attempt:
        """Returns what the draw gives when it starts at that version."""
        chunk, place = divmod(index, CHUNK)
        if (version, chunk) not in self._chunks:
            self._chunks[version, chunk] = self._make(version, chunk)
        return self._chunks[version, chunk][place]

    def _make(self, version: int, chunk: int) -> list[Attempt]:
        w = self._workload
        rng = np.random.default_rng((w.seed, version, chunk))
        drift = w.rate_drift * (chunk * CHUNK + np.arange(CHUNK)) / 1000
        mixed = rng.random(CHUNK) < np.clip(w.rate + drift, LEAST_RATE, 1.0)
        same = np.where(rng.random(CHUNK) < 0.5, 0, w.n)
        right = np.where(mixed, rng.integers(1, w.n, CHUNK), same)
        ranks = rng.permuted(np.tile(np.arange(w.n), (CHUNK, 1)), axis=1)
        lengths = np.exp(math.log(w.median) + w.sigma * rng.standard_normal((CHUNK, w.n)))
        is_right = ranks < right[:, None]
        lengths = np.where(is_right, lengths, lengths * w.wrong_longer)
        whole = np.clip(lengths, 1, w.cap).astype(int).tolist()
        return [Attempt(tuple(row), tuple(each)) for row, each in zip(whole, is_right.tolist(), strict=True)]


class Fleet:
    """Simulates `engines` with `slots` each, and `lent` more that sleep at first. Time is in tokens of one slot; `now`
    stands still while the fleet is paused."""

    def __init__(self, *, engines: int, slots: int, lent: int = 0) -> None:
        self.now = 0.0
        self.busy = self.lent_busy = 0.0  # slot-time in use, of the engines and of those that are lent
        self.in_flight = 0  # responses submitted and not finished
        self.ended = self.ended_tokens = 0  # responses that came to their end
        self.awake = engines
        self._engines, self._lent, self._slots = engines, lent, slots
        self._free = [slots] * (engines + lent)
        self._queues: list[deque[tuple[int, int]]] = [deque() for _ in range(engines + lent)]
        self._events: list[tuple[float, int, int, int]] = []  # (end, engine, draw, sample)
        self._lengths: dict[int, tuple[int, ...]] = {}  # of draws in flight
        self._began: dict[tuple[int, int], float] = {}
        self._left: dict[int, int] = {}  # responses of a draw that did not end
        self._made: dict[int, int] = {}  # tokens of those that did, for unfinished draws
        self._put_down: dict[tuple[int, int], float] = {}  # tokens of responses that wait to go on

    @property
    def capacity(self) -> int:
        """Counts the slots of the engines that are awake."""
        return self.awake * self._slots

    @property
    def queued(self) -> int:
        """Counts the responses that wait for a slot."""
        return sum(map(len, self._queues))

    def wake(self) -> None:
        """Lets the lent engines take what is submitted from now on."""
        self.awake = self._engines + self._lent

    def sleep(self) -> None:
        """Ends the lent engines' part: what they run and what waits for them goes on elsewhere, before what is new."""
        self.awake = self._engines
        moved = sorted(key for engine in range(self._engines, len(self._queues)) for key in self._queues[engine])
        for _, engine, draw, sample in self._events:
            if engine >= self._engines:
                self._put_down[draw, sample] = self.now - self._began.pop((draw, sample))
                moved.append((draw, sample))
        self._events = [event for event in self._events if event[1] < self._engines]
        heapq.heapify(self._events)
        for engine in range(self._engines, len(self._queues)):
            self._queues[engine].clear()
            self._free[engine] = self._slots
        for key in sorted(moved, reverse=True):
            engine = self._least_loaded()
            if self._free[engine]:
                self._free[engine] -= 1
                self._begin(engine, *key)
            else:
                self._queues[engine].appendleft(key)

    def _least_loaded(self) -> int:
        return min(range(self.awake), key=lambda e: len(self._queues[e]) - self._free[e])

    def submit(self, index: int, lengths: tuple[int, ...]) -> None:
        """Sends all responses of a draw to the engine with the fewest."""
        engine = self._least_loaded()
        n = len(lengths)
        self._lengths[index] = lengths
        self._left[index] = n
        self._made[index] = 0
        self.in_flight += n
        for sample in range(n):
            if self._free[engine]:
                self._free[engine] -= 1
                self._begin(engine, index, sample)
            else:
                self._queues[engine].append((index, sample))

    def _begin(self, engine: int, index: int, sample: int) -> None:
        began = self._began[index, sample] = self.now - self._put_down.pop((index, sample), 0.0)
        end = began + self._lengths[index][sample]
        heapq.heappush(self._events, (end, engine, index, sample))

    @property
    def next_end(self) -> float:
        """Returns when the next response ends; infinite without one."""
        return self._events[0][0] if self._events else math.inf

    def advance(self, now: float) -> None:
        """Lets time pass, at most to the next end."""
        slots, edge = self._slots, self._engines
        self.busy += (edge * slots - sum(self._free[:edge])) * (now - self.now)
        self.lent_busy += (self._lent * slots - sum(self._free[edge:])) * (now - self.now)
        self.now = now

    def step(self) -> Ended:
        """Runs to the end of the next response."""
        end, engine, index, sample = heapq.heappop(self._events)
        self.advance(end)
        del self._began[index, sample]
        self.in_flight -= 1
        self.ended += 1
        self.ended_tokens += self._lengths[index][sample]
        self._made[index] += self._lengths[index][sample]
        self._release(engine)
        self._left[index] -= 1
        last = not self._left[index]
        if last:
            del self._left[index], self._made[index], self._lengths[index]
        return Ended(index, sample, last)

    def abort(self, indices: Collection[int]) -> int:
        """Ends these draws, running or waiting, and returns the tokens that the unfinished ones had made."""
        gone = {index for index in indices if index in self._left}
        if not gone:
            return 0
        made = sum(self._made[index] for index in gone)
        made += sum(int(self.now - began) for (index, _), began in self._began.items() if index in gone)
        waiting = [key for key in self._put_down if key[0] in gone]
        made += sum(int(self._put_down.pop(key)) for key in waiting)
        for queue in self._queues:
            kept = [entry for entry in queue if entry[0] not in gone]
            queue.clear()
            queue.extend(kept)
        ended = [event for event in self._events if event[2] in gone]
        self._events = [event for event in self._events if event[2] not in gone]
        heapq.heapify(self._events)
        self.in_flight -= sum(self._left.pop(index) for index in gone)
        for index in gone:
            del self._made[index], self._lengths[index]
        for _, engine, index, sample in ended:
            del self._began[index, sample]
            self._release(engine)
        return made

    def _release(self, engine: int) -> None:
        """Frees a slot: the next response of the engine's queue takes it."""
        if self._queues[engine]:
            self._begin(engine, *self._queues[engine].popleft())
        else:
            self._free[engine] += 1
