"""Declares what the algorithm needs of the compute: three protocols and one callable.

`workers.{rollout,reward,actor}` fulfil them over Ray; tests also bring in-process stand-ins.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dapo.types import Float32Array, Int32Array, Prompt, Response, Sampling, Score, TrainBatch, TrainSequence


class RolloutPool(Protocol):
    """Stands for the engines."""

    @property
    def capacity(self) -> int:
        """Counts the responses that all engines together run at once: sequences, or what the KV cache holds."""
        ...

    def room(self, n: int) -> int:
        """Counts the groups of n responses that may start now without waiting long for an engine."""
        ...

    def generate(
        self, key: str, prompt: Int32Array, sampling: Sampling, seeds: Sequence[int]
    ) -> AsyncGenerator[tuple[int, Response]]:
        """Yields the responses to one prompt as they end, each with its number; response number k has `seeds[k]`."""
        ...

    def restarts(self) -> dict[str, float]:
        """Returns how many engines were replaced so far, as metrics."""
        ...

    async def abort(self, keys: list[str]) -> None:
        """Ends the named groups; their unfinished responses come as far as they are, marked as aborted."""
        ...


class RewardPool(Protocol):
    """Stands for the reward workers."""

    async def score(self, prompt: Prompt, sample: int, response: Response) -> Score:
        """Scores response number `sample` to the prompt."""
        ...

    def restarts(self) -> dict[str, float]:
        """Returns how many processes were replaced so far, as metrics."""
        ...

    async def check(self) -> None:
        """Raises RuntimeError when known answers are not scored as they must be: no verdict can be trusted then."""
        ...


class ActorPool(Protocol):
    """Stands for all FSDP ranks as one."""

    async def update(self, batch: TrainBatch) -> dict[str, float]: ...

    async def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]: ...

    async def save(self, directory: str) -> None: ...

    async def load(self, directory: str) -> None: ...

    async def export_hf(self, directory: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Holds the compute of a run, composed in `dapo.run.build_pools`.

    sync_weights(version): the engines serve `version`. weights: held while the actors' weights are not those that the
    engines serve, from before an update to the end of the sync; an engine that starts again takes its weights between.
    """

    rollouts: RolloutPool
    rewards: RewardPool
    actors: ActorPool
    sync_weights: Callable[[int], Awaitable[None]]
    weights: asyncio.Lock = field(default_factory=asyncio.Lock)
