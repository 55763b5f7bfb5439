"""In-process pools that fail, keep silent, answer late or have little room, and streams around them (tests only)."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import replace
from typing import TypeVar

from dapo.config.schema import Config
from dapo.data.order import PromptOrder
from dapo.evaluation.held_out import Evaluation
from dapo.evaluation.summary import metrics, summaries
from dapo.ground.clock import PhaseClock
from dapo.pools import ActorsLost
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.stream import GroupStream
from dapo.types import Collected, HeldOut, Prompt, Request, Response, Sampling, Score, VersionSpan
from tests.support.fakes import FakeRewards, FakeRollouts, make_prompt, make_response

N = 4  # responses of a group
T = TypeVar("T")
Seeds = Sequence[int]
Responses = AsyncGenerator[tuple[int, Response]]
SEED = 7
PROMPTS = [make_prompt(number) for number in range(40)]
SETTINGS = Sampling(n=N, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=32)
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

    async def generate(self, request: Request) -> Responses:
        self.count("generate")
        async for each in super().generate(request):
            yield each

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
    """Groups from draw `first` on end by abort alone."""

    first = 0

    async def generate(self, request: Request) -> Responses:
        while int(request.key.partition("-d")[2]) >= self.first and request.key not in self._stop:
            await asyncio.sleep(0)
        async for each in super().generate(request):
            yield each


class StubbornRollouts(FakeRollouts):
    """Ends no group before its time: an abort comes too late. twice: draws that ran twice at the same moment."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.running: list[str] = []
        self.twice = 0

    async def generate(self, request: Request) -> Responses:
        draw = request.key.partition("-")[2]
        self.twice += draw in self.running
        self.running.append(draw)
        async for each in super().generate(request):
            yield each
        self.running.remove(draw)

    async def abort(self, keys: list[str]) -> None:
        self.aborted += keys


class SpanRollouts(FakeRollouts):
    """A token per turn, each of the version that is served then."""

    async def generate(self, request: Request) -> Responses:
        versions: list[int] = []
        for _ in range(self._random.randint(1, self._max_turns)):
            versions.append(self.version)
            await asyncio.sleep(0)
            if request.key in self._stop:
                break
        spans = tuple(
            VersionSpan(version=v, start=versions.index(v), end=versions.index(v) + versions.count(v))
            for v in sorted(set(versions))
        )
        whole = make_response(len(versions), "abort" if request.key in self._stop else "stop")
        for sample in range(request.sampling.n):
            yield sample, replace(whole, policy_versions=spans)


class NarrowRollouts(FakeRollouts):
    """Engines for `capacity` responses."""

    capacity = 3 * N
    running = 0
    most = 0

    def room(self, n: int) -> int:
        return max(0, (self.capacity - self.running) // n)

    @property
    def spare(self) -> int:
        return self.room(1)

    async def generate(self, request: Request) -> Responses:
        self.running += request.sampling.n
        self.most = max(self.most, self.running)
        left = request.sampling.n
        try:
            async for each in super().generate(request):
                left -= 1
                self.running -= 1
                yield each
        finally:
            self.running -= left


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


async def evaluated(rollouts, rewards, held_out: Sequence[Prompt], n: int) -> dict[str, float]:
    """Metrics of an evaluation with n samples per prompt."""
    cfg = Config()
    cfg.eval.top_p, cfg.data.max_response_length, cfg.trainer.seed = 0.7, SETTINGS.max_tokens, SEED
    sets = [HeldOut(name="", prompts=tuple(held_out), samples=(n,) * len(held_out))]
    evaluation = Evaluation(sets, rollouts, rewards, cfg, version=0)
    try:
        evaluation.hurry()
        return metrics(summaries(await evaluation.answers()))
    finally:
        await evaluation.close()


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


async def collect(stream: GroupStream, version: int) -> Collected:
    """Collects for the update from policy `version`, which the engines serve."""
    stream.buffer.serving(version)
    return await stream.collect()


async def steps(stream: GroupStream, versions: range, update_turns: int = 0) -> list[list[int]]:
    """What each step uses up; the updates take some turns."""
    used = []
    for version in versions:
        used.append(drawn(await collect(stream, version)))
        await turns(update_turns)
        stream.buffer.trained()
        stream.buffer.serving(version + 1)
    return used


def lost(number: int = 1) -> ActorsLost:
    return ActorsLost(f"rank {number} is gone")
