"""Simulates a fleet of engines that generate draws with random lengths and verdicts. A response occupies one slot of
one engine for its number of tokens times the time per token; an engine without a free slot queues. How draws are chosen
is decided elsewhere, by the same buffer as in a real run."""

import heapq
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

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

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._chunks: dict[tuple[int, int], list[Attempt]] = {}

    def attempt(self, index: int, version: int) -> Attempt:
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
    """Engines with slots and a queue each. Time is in tokens of one slot."""

    def __init__(self, *, engines: int, slots: int) -> None:
        self.now = 0.0
        self.busy = 0.0  # slot-time in use
        self.in_flight = 0  # responses submitted and not finished
        self._slots = slots
        self._free = [slots] * engines
        self._queues: list[deque[tuple[int, int]]] = [deque() for _ in range(engines)]
        self._events: list[tuple[float, int, int, int]] = []  # (end, engine, draw, sample)
        self._lengths: dict[int, tuple[int, ...]] = {}  # of draws in flight
        self._left: dict[int, int] = {}  # unfinished responses of a draw
        self._made: dict[int, int] = {}  # tokens of finished responses of unfinished draws

    @property
    def next_end(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def submit(self, index: int, lengths: tuple[int, ...]) -> None:
        """Sends all responses of a draw to the least loaded engine."""
        engine = min(range(len(self._free)), key=lambda e: len(self._queues[e]) - self._free[e])
        self._lengths[index], self._left[index], self._made[index] = lengths, len(lengths), 0
        self.in_flight += len(lengths)
        for sample in range(len(lengths)):
            if self._free[engine]:
                self._free[engine] -= 1
                self._begin(engine, index, sample)
            else:
                self._queues[engine].append((index, sample))

    def _begin(self, engine: int, index: int, sample: int) -> None:
        heapq.heappush(self._events, (self.now + self._lengths[index][sample], engine, index, sample))

    def advance(self, now: float) -> None:
        """Advances the time, at most to the next end."""
        self.busy += (len(self._free) * self._slots - sum(self._free)) * (now - self.now)
        self.now = now

    def pause(self, duration: float) -> None:
        """Advances the time without any progress of the responses."""
        self.now += duration
        self._events = [
            (end + duration, engine, index, sample) for end, engine, index, sample in self._events
        ]  # in the same order

    def step(self) -> tuple[int, int, bool]:
        """Returns draw and sample of the next response that ends, and whether its draw is complete with it."""
        end, engine, index, sample = heapq.heappop(self._events)
        self.advance(end)
        self.in_flight -= 1
        self._made[index] += self._lengths[index][sample]
        self._left[index] -= 1
        self._release(engine)
        complete = not self._left[index]
        if complete:
            del self._left[index], self._made[index], self._lengths[index]
        return index, sample, complete

    def abort(self, indices: Collection[int]) -> int:
        """Aborts these draws, running or waiting, and returns the tokens of the unfinished ones."""
        gone = {index for index in indices if index in self._left}
        stopped = [event for event in self._events if event[2] in gone]
        made = sum(self._made[index] for index in gone)
        made += sum(int(self._lengths[index][sample] - (end - self.now)) for end, _, index, sample in stopped)
        for queue in self._queues:
            kept = [entry for entry in queue if entry[0] not in gone]
            queue.clear()
            queue.extend(kept)
        self._events = [event for event in self._events if event[2] not in gone]
        heapq.heapify(self._events)
        self.in_flight -= sum(self._left.pop(index) for index in gone)
        for index in gone:
            del self._made[index], self._lengths[index]
        for _, engine, *_ in stopped:
            self._release(engine)
        return made

    def _release(self, engine: int) -> None:
        if self._queues[engine]:
            self._begin(engine, *self._queues[engine].popleft())
        else:
            self._free[engine] += 1
