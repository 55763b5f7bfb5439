"""In-process pools that fail, keep silent, answer late or have little room, and streams around them (tests only)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dapo.clock import PhaseClock
from dapo.data.prompts import PromptOrder
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.stream import GroupStream, SamplingSettings
from dapo.types import Collected, Int32Array, Prompt, Response, Sampling, Score, VersionSpan
from tests.support.fakes import FakeRewards, FakeRollouts, make_prompt, make_response, told

N = 4  # responses of a group
T = TypeVar("T")
Ended = Callable[[int, Response], None]
SEED = 7
PROMPTS = [make_prompt(number) for number in range(40)]
SETTINGS = SamplingSettings(n=N, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=32)
PATIENCE_S = 10.0  # nothing here takes one


def some_mixed(prompt: Prompt, sample: int, response: Response) -> float:
    return float(prompt.id % 3 != 0 and sample % 2 == 1)


class BrokenRollouts(FakeRollouts):
    """Raises at the call number `at` of `generate` or `abort`."""

    def __init__(self, method: str = "", at: int = 0, **options) -> None:
        super().__init__(**options)
        self.fuse = {method: at}

    def count(self, method: str) -> None:
        self.fuse[method] = self.fuse.get(method, 0) - 1
        if self.fuse[method] == 0:
            raise RuntimeError(f"{method} broke")

    async def generate(self, key: str, prompt: Int32Array, sampling: Sampling, ended: Ended) -> tuple[Response, ...]:
        self.count("generate")
        return await super().generate(key, prompt, sampling, ended)

    async def abort(self, keys: list[str]) -> None:
        self.count("abort")
        await super().abort(keys)


class BrokenRewards(FakeRewards):
    """Raises at the call number `at`, or never answers to the first call for the prompts of `silent`."""

    def __init__(self, verdict=lambda prompt, sample, response: sample % 2, *, at: int = 0, silent=()) -> None:
        super().__init__(verdict)
        self.at, self.silent = at, set(silent)

    async def score(self, prompt: Prompt, sample: int, response: Response) -> Score:
        self.at -= 1
        if self.at == 0:
            raise RuntimeError("score broke")
        if prompt.id in self.silent:
            self.silent.remove(prompt.id)
            await asyncio.Event().wait()
        return await super().score(prompt, sample, response)


class EndlessRollouts(BrokenRollouts):
    """From draw `first` on, groups end by abort alone."""

    first = 0

    async def generate(self, key: str, prompt: Int32Array, sampling: Sampling, ended: Ended) -> tuple[Response, ...]:
        if int(key.partition("-d")[2]) < self.first:
            return await super().generate(key, prompt, sampling, ended)
        while key not in self._stop:
            await asyncio.sleep(0)
        return tuple(make_response(2, "abort") for _ in range(sampling.n))


class StubbornRollouts(FakeRollouts):
    """Ends no group before its time: an abort comes too late. twice: draws that ran twice at the same moment."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.running: list[str] = []
        self.twice = 0

    async def generate(self, key: str, prompt: Int32Array, sampling: Sampling, ended: Ended) -> tuple[Response, ...]:
        draw = key.partition("-")[2]
        self.twice += draw in self.running
        self.running.append(draw)
        responses = await super().generate(key, prompt, sampling, ended)
        self.running.remove(draw)
        return responses

    async def abort(self, keys: list[str]) -> None:
        self.aborted += keys


class SpanRollouts(FakeRollouts):
    """A token per turn, each of the version that is served then."""

    async def generate(self, key: str, prompt: Int32Array, sampling: Sampling, ended: Ended) -> tuple[Response, ...]:
        versions: list[int] = []
        for _ in range(self._random.randint(1, self._max_turns)):
            versions.append(self.version)
            await asyncio.sleep(0)
            if key in self._stop:
                return tuple(make_response(len(versions), "abort") for _ in range(sampling.n))
        spans = tuple(
            VersionSpan(version=v, start=versions.index(v), end=versions.index(v) + versions.count(v))
            for v in sorted(set(versions))
        )
        whole = make_response(len(versions))
        one = Response(
            token_ids=whole.token_ids,
            rollout_logprobs=whole.rollout_logprobs,
            text="",
            finish_reason="stop",
            policy_versions=spans,
            seconds=0.0,
        )
        return told(ended, [one] * sampling.n)


class NarrowRollouts(FakeRollouts):
    """Engines for `capacity` responses, which tell when one has ended."""

    capacity = 3 * N
    running = 0
    most = 0

    def freed(self) -> None:
        """Nobody listens yet."""

    def notify(self, freed: Callable[[], None]) -> None:
        self.freed = freed  # type: ignore[method-assign]

    def room(self, n: int) -> int:
        return max(0, (self.capacity - self.running) // n)

    async def generate(self, key: str, prompt: Int32Array, sampling: Sampling, ended: Ended) -> tuple[Response, ...]:
        self.running += sampling.n
        self.most = max(self.most, self.running)
        try:
            return await super().generate(key, prompt, sampling, ended)
        finally:
            self.running -= sampling.n
            self.freed()


def make_stream(rollouts, rewards=None, *, staleness: int = 0, batch: int = 4, max_draws: int = 0) -> GroupStream:
    buffer = OversamplingBuffer(train_batch_size=batch, max_in_flight=12, max_staleness=staleness, max_draws=max_draws)
    order = PromptOrder(PROMPTS, seed=0, shuffle=False)
    rewards = rewards or BrokenRewards()
    return GroupStream(order, buffer, rollouts, rewards, SETTINGS, seed=SEED, clock=PhaseClock())


def resumed(stream: GroupStream, rewards, *, version: int, staleness: int) -> GroupStream:
    """Another stream with sound engines that goes on from what a checkpoint of this one holds."""
    again = make_stream(FakeRollouts(), rewards, staleness=staleness)
    again.buffer.restore(stream.buffer.state(), stream.buffer.held(), version=version)
    return again


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(work: Awaitable[T]) -> T:
    """Its result, in time, with nothing left running."""

    async def whole() -> T:
        async with asyncio.timeout(PATIENCE_S):
            result = await work
        await turns(3)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return result

    return asyncio.run(whole())


def drawn(collected: Collected) -> list[int]:
    return [group.draw.index for group in collected.drawn]


async def steps(stream: GroupStream, versions: range, update_turns: int = 0) -> list[list[int]]:
    """What each step uses up; the updates take some turns."""
    used = []
    for version in versions:
        used.append(drawn(await stream.collect(version)))
        await turns(update_turns)
        stream.buffer.trained()
        stream.buffer.version = version + 1
    return used
