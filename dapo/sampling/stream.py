"""The stream: draws go out to the engines, scored groups come back into the buffer (DESIGN sections 3 and 4).

In: prompts in their counter-based order, two pools, a buffer. Out: one `Collected` per step. Responses flow one at
a time: each is scored when it ends, its group is kept when all are, and the buffer refills at once; there is no
generation barrier.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dapo.clock import PhaseClock
from dapo.config.schema import EvalConfig, RolloutConfig
from dapo.data.prompts import PromptOrder
from dapo.pools import RewardPool, RolloutPool
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.saved import read_groups
from dapo.types import Collected, Draw, Group, Response, Sampling, Score

CLOSE_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """What all groups of a stream or of an evaluation share; see `Sampling`."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int

    @classmethod
    def of(cls, section: RolloutConfig | EvalConfig, max_tokens: int) -> "SamplingSettings":
        """From `cfg.rollout` or `cfg.eval`, which name these settings alike."""
        return cls(
            n=section.n,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            max_tokens=max_tokens,
        )

    def at(self, *seed_words: int | str) -> Sampling:
        """The sampling of one group: a seed per response, derived from the words."""
        seeds = tuple(response_seed(*seed_words, sample) for sample in range(self.n))
        return Sampling(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            seeds=seeds,
        )


def response_seed(*words: int | str) -> int:
    """A 63-bit sampling seed from run seed, draw, policy version and sample: the same for a retry, new for all else."""
    image = "/".join(str(word) for word in words).encode()
    return int.from_bytes(hashlib.blake2b(image, digest_size=8).digest(), "big") >> 1


async def scored_group(
    draw: Draw,
    key: str,
    sampling: Sampling,
    rollouts: RolloutPool,
    rewards: RewardPool,
    clock: PhaseClock,
    still_wanted: Callable[[int], bool] = lambda tokens: True,
) -> Group:
    """Generates one group and scores each response as it ends. When all have ended it tells the number of tokens and
    asks whether the group is still wanted; one that is not comes back without scores, as an aborted one does."""
    verdicts: dict[int, asyncio.Future[Score]] = {}

    def ended(sample: int, response: Response) -> None:
        if response.finish_reason != "abort":
            verdicts[sample] = asyncio.ensure_future(rewards.score(draw.prompt, sample, response))

    try:
        with clock("generation"):
            responses = await rollouts.generate(key, draw.prompt.token_ids, sampling, ended)
        aborted = len(verdicts) < len(responses)
        if aborted or not still_wanted(sum(len(response.token_ids) for response in responses)):
            return Group(draw=draw, responses=responses, scores=())
        with clock("reward"):
            scores = await asyncio.gather(*[verdicts[sample] for sample in range(len(responses))])
        return Group(draw=draw, responses=responses, scores=tuple(scores))
    finally:
        for verdict in verdicts.values():
            verdict.cancel()


class GroupStream:
    """Keeps as many draws in flight as the buffer asks for.

    One task, the pump, starts draws and takes in what finishes; it lives as long as the stream and also runs while the
    actors update. At staleness 0 the buffer asks for nothing then, and the engines rest.
    """

    def __init__(
        self,
        order: PromptOrder,
        buffer: OversamplingBuffer,
        rollouts: RolloutPool,
        rewards: RewardPool,
        settings: SamplingSettings,
        *,
        seed: int,
        clock: PhaseClock,
    ) -> None:
        self.buffer = buffer
        self._order = order
        self._rollouts = rollouts
        self._rewards = rewards
        self._settings = settings
        self._seed = seed
        self._clock = clock
        self._aborted_before = 0
        self._running: dict[asyncio.Task[Group], tuple[int, str]] = {}  # draw and key of each
        self._keys: dict[int, str] = {}  # of the draws in flight; one that went back may be in flight again
        self._finished: deque[asyncio.Task[Group]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        rollouts.notify(self._wake.set)

    @property
    def aborted_tokens(self) -> int:
        """Generated in the last step for draws that went back to the stream; depends on timing."""
        return self.buffer.draws.lost_tokens - self._aborted_before

    async def collect(self, version: int) -> Collected:
        """A full batch for the update from policy `version`, which the engines serve.

        Raises:
            BudgetExhausted: see `OversamplingBuffer.take`. And whatever the pools raise, also because they score known
            answers wrong.
        """
        self._aborted_before = self.buffer.draws.lost_tokens
        self.buffer.open(version)
        self._full.clear()
        self._wake.set()
        if self._pump is None:
            self._pump = asyncio.create_task(self._run())
        full = asyncio.create_task(self._full.wait())
        try:
            await asyncio.wait({full, self._pump}, return_when=asyncio.FIRST_COMPLETED)
            if self._pump.done():
                self._pump.result()  # raises
            await self._rewards.check()
            return await self._abort(self.buffer.close())
        finally:
            full.cancel()

    async def rescored(self, checkpoint: Path) -> list[tuple[Group, int]]:
        """The groups of a checkpoint, scored anew: verdicts are cheap, and the old ones may be why the run stopped."""

        async def score(group: Group) -> Group:
            prompt, responses = group.draw.prompt, enumerate(group.responses)
            scores = await asyncio.gather(*[self._rewards.score(prompt, k, response) for k, response in responses])
            return replace(group, scores=tuple(scores))

        held = read_groups(checkpoint, self._order.draw)
        groups = await asyncio.gather(*[score(group) for group, _ in held])
        return [(group, started) for group, (_, started) in zip(groups, held, strict=True)]

    async def close(self) -> None:
        """Ends the pump and what is in flight; the buffer keeps what had finished.

        The engines may be what failed: their part in it is given `CLOSE_GRACE_S` and its failure is not told.
        """
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
            self._pump = None
        if self._running:
            with suppress(Exception):
                await asyncio.wait_for(self._rollouts.abort(list(self._keys.values())), CLOSE_GRACE_S)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        self._keys.clear()

    async def _run(self) -> None:
        """The pump."""
        while True:
            for index in self.buffer.take(self._rollouts.room(self._settings.n)):
                self._start(index)
            if self.buffer.collecting and self.buffer.full:
                self._full.set()
            await asyncio.sleep(0)  # what was just started takes its room only now
            await self._wake.wait()
            self._wake.clear()
            while self._finished:
                task = self._finished.popleft()
                if task not in self._running:  # its draw went back to the stream
                    continue
                index, key = self._running.pop(task)
                del self._keys[index]
                group = task.result()
                if not group.scores:
                    raise RuntimeError(f"an engine ended group {key} unasked; its log may say why")
                self.buffer.add(group)

    def _start(self, index: int) -> None:
        key = self._keys[index] = f"v{self.buffer.version}-d{index}"
        task = asyncio.create_task(self._group(index, key, self.buffer.version))
        self._running[task] = (index, key)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[Group]) -> None:
        self._finished.append(task)
        self._wake.set()

    async def _group(self, index: int, key: str, version: int) -> Group:
        return await scored_group(
            self._order.draw(index),
            key,
            self._settings.at(self._seed, index, version),
            self._rollouts,
            self._rewards,
            self._clock,
            lambda tokens: self._generated(index, key, tokens),
        )

    def _generated(self, index: int, key: str, tokens: int) -> bool:
        """Whether the group is still wanted."""
        if self._keys.get(index) != key:
            return False
        self.buffer.generated(index, tokens)
        return True

    async def _abort(self, collected: Collected) -> Collected:
        """Ends the draws that went back to the stream and counts what they had generated."""
        gone = {task: place for task, place in self._running.items() if place[0] in collected.returned}
        for task, (index, _) in gone.items():
            del self._running[task], self._keys[index]
            if index not in collected.unfinished:
                task.cancel()  # nobody waits for its verdict
        unfinished = {task: key for task, (index, key) in gone.items() if index in collected.unfinished}
        if not unfinished:
            return collected
        try:
            await self._rollouts.abort(list(unfinished.values()))
            cut = await asyncio.gather(*unfinished)
        finally:
            for task in unfinished:  # where the abort failed
                task.cancel()
        self.buffer.aborted(sum(group.num_tokens for group in cut))
        return replace(collected, lost=(*collected.lost, *cut))
