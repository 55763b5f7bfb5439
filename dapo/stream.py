"""The stream: draws go out to the engines, scored groups come back into the buffer (DESIGN sections 3 and 4).

In: prompts in their counter-based order, two pools, a buffer. Out: one `Collected` per step. Groups flow one at a time:
each is scored when its own responses are complete, and the buffer refills at once; there is no generation barrier.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from dapo.buffer import Collected, OversamplingBuffer
from dapo.clock import PhaseClock
from dapo.config import EvalConfig, RolloutConfig
from dapo.data import PromptOrder
from dapo.pools import RewardPool, RolloutPool
from dapo.types import Draw, Group, Sampling


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
    on_generated: Callable[[int], None] = lambda tokens: None,
) -> Group:
    """Generates and scores one group; between the two it tells the number of tokens. An aborted group comes back
    without scores."""
    with clock("generation"):
        responses = await rollouts.generate(key, draw.prompt.token_ids, sampling)
    if any(response.finish_reason == "abort" for response in responses):
        return Group(draw=draw, responses=responses, scores=())
    on_generated(sum(len(response.token_ids) for response in responses))
    with clock("reward"):
        scores = await rewards.score(draw.prompt, responses)
    return Group(draw=draw, responses=responses, scores=scores)


class GroupStream:
    """Keeps as many draws in flight as the buffer asks for, until the buffer has a batch."""

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

    @property
    def aborted_tokens(self) -> int:
        """Generated in the last step for draws that went back to the stream; depends on timing."""
        return self.buffer.ledger.tokens["aborted"] - self._aborted_before

    async def collect(self, version: int) -> Collected:
        """A full batch sampled by policy `version`.

        Raises:
            BudgetExhausted: see `OversamplingBuffer.take`.
        """
        self.buffer.open(version)
        self._aborted_before = self.buffer.ledger.tokens["aborted"]
        running: dict[asyncio.Task[Group], int] = {}
        try:
            while not self.buffer.full:
                for index in self.buffer.take():
                    running[asyncio.create_task(self._group(index, version))] = index
                finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    del running[task]
                    self.buffer.add(task.result())
            collected = self.buffer.close()
            await self._abort(running, collected, version)
            return collected
        finally:
            for task in running:
                task.cancel()

    async def _group(self, index: int, version: int) -> Group:
        sampling = self._settings.at(self._seed, index, version)
        return await scored_group(
            self._order.draw(index),
            _key(index, version),
            sampling,
            self._rollouts,
            self._rewards,
            self._clock,
            lambda tokens: self.buffer.generated(index, tokens),
        )

    async def _abort(self, running: dict[asyncio.Task[Group], int], collected: Collected, version: int) -> None:
        """Ends the draws that went back to the stream and counts what they had generated."""
        if running:
            await self._rollouts.abort([_key(index, version) for index in running.values()])
            groups = await asyncio.gather(*running)
            lost = [group.num_tokens for group in groups if group.draw.index in collected.unfinished]
            self.buffer.ledger.aborted(sum(lost))
            running.clear()


def _key(index: int, version: int) -> str:
    """Names a group's requests to the engines."""
    return f"v{version}-d{index}"
