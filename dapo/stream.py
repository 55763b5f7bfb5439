"""The stream: draws go out to the engines, scored groups come back into the buffer (DESIGN sections 3 and 4).

In: prompts in their counter-based order, two pools, a buffer. Out: one `Collected` per step. Groups flow one at a time:
each is scored when its own responses are complete, and the buffer refills at once; there is no generation barrier.
"""

import asyncio
import hashlib
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
    draw: Draw, key: str, sampling: Sampling, rollouts: RolloutPool, rewards: RewardPool, clock: PhaseClock
) -> Group:
    """Generates and scores one group. An aborted group comes back without scores."""
    with clock("generation"):
        responses = await rollouts.generate(key, draw.prompt.token_ids, sampling)
    if any(response.finish_reason == "abort" for response in responses):
        return Group(draw=draw, responses=responses, scores=())
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
        self.aborted_tokens = 0  # generated in the last step for draws that went back; depends on timing
        self._order = order
        self._rollouts = rollouts
        self._rewards = rewards
        self._settings = settings
        self._seed = seed
        self._clock = clock

    async def collect(self, version: int) -> Collected:
        """A full batch sampled by policy `version`.

        Raises:
            BudgetExhausted: see `OversamplingBuffer.take`.
        """
        self.buffer.open(version)
        running: dict[asyncio.Task[Group], int] = {}
        try:
            while not self.buffer.full:
                for index in self.buffer.take():
                    running[asyncio.create_task(self._group(index, version))] = index
                finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    self.buffer.add(task.result())
                    del running[task]
            collected = self.buffer.close()
            await self._abort(running, version)
            return collected
        finally:
            for task in running:
                task.cancel()

    async def _group(self, index: int, version: int) -> Group:
        sampling = self._settings.at(self._seed, index, version)
        draw, key = self._order.draw(index), _key(index, version)
        responses = await generated(draw, key, sampling, self._rollouts, self._clock)
        self.buffer.generated(index, sum(len(response.token_ids) for response in responses))
        return await scored(draw, responses, self._rewards, self._clock)

    async def _abort(self, running: dict[asyncio.Task[Group], int], version: int) -> None:
        """Ends the draws that go back to the stream and counts what they had generated."""
        self.aborted_tokens = 0
        if running:
            await self._rollouts.abort([_key(index, version) for index in running.values()])
            groups = await asyncio.gather(*running)
            self.aborted_tokens = sum(group.num_tokens for group in groups)
            running.clear()


def _key(index: int, version: int) -> str:
    """Names a group's requests to the engines."""
    return f"v{version}-d{index}"
