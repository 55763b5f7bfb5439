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
        mixed = rng.random(CHUNK) < np.clip(w.rate + drift, 0.01, 1.0)
        same = np.where(rng.random(CHUNK) < 0.5, 0, w.n)
        right = np.where(mixed, rng.integers(1, w.n, CHUNK), same)
        ranks = rng.permuted(np.tile(np.arange(w.n), (CHUNK, 1)), axis=1)
        lengths = np.exp(math.log(w.median) + w.sigma * rng.standard_normal((CHUNK, w.n)))
        is_right = ranks < right[:, None]
        lengths = np.where(is_right, lengths, lengths * w.wrong_longer)
        whole = np.clip(lengths, 1, w.cap).astype(int).tolist()
        return [Attempt(tuple(row), tuple(each)) for row, each in zip(whole, is_right.tolist(), strict=True)]


class Fleet:
    """Simulates `engines` with `slots` each. Time is in tokens of one slot; `now` stands still while the fleet is
    paused."""

    def __init__(self, *, engines: int, slots: int) -> None:
        self.now = 0.0
        self.busy = 0.0  # slot-time in use
        self.in_flight = 0  # responses submitted and not finished
        self.capacity = engines * slots
        self._free = [slots] * engines
        self._queues: list[deque[tuple[int, int]]] = [deque() for _ in range(engines)]
        self._running = 0
        self._events: list[tuple[float, int, int, int]] = []  # (end, engine, draw, sample)
        self._lengths: dict[int, tuple[int, ...]] = {}  # of draws in flight
        self._began: dict[tuple[int, int], float] = {}
        self._left: dict[int, int] = {}  # responses of a draw that did not end
        self._made: dict[int, int] = {}  # tokens of those that did, for unfinished draws

    def submit(self, index: int, lengths: tuple[int, ...]) -> None:
        """Sends all responses of a draw to the engine with the fewest."""
        engine = min(range(len(self._free)), key=lambda e: len(self._queues[e]) - self._free[e])
        n = len(lengths)
        self._lengths[index] = lengths
        self._left[index] = n
        self._made[index] = 0
        self.in_flight += n
        for sample in range(n):
            if self._free[engine]:
                self._free[engine] -= 1
                self._running += 1
                self._begin(engine, index, sample)
            else:
                self._queues[engine].append((index, sample))

    def _begin(self, engine: int, index: int, sample: int) -> None:
        self._began[index, sample] = self.now
        end = self.now + self._lengths[index][sample]
        heapq.heappush(self._events, (end, engine, index, sample))

    @property
    def next_end(self) -> float:
        """Returns when the next response ends; infinite without one."""
        return self._events[0][0] if self._events else math.inf

    def advance(self, now: float) -> None:
        """Lets time pass, at most to the next end."""
        self.busy += self._running * (now - self.now)
        self.now = now

    def step(self) -> Ended:
        """Runs to the end of the next response."""
        end, engine, index, sample = heapq.heappop(self._events)
        self.advance(end)
        del self._began[index, sample]
        self.in_flight -= 1
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
            self._running -= 1
