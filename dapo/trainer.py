"""Algorithm 1 of the paper (arXiv 2503.14476): one rollout step after another.

    collect ──▶ advantages, weights ──▶ update ──▶ sync weights
    (stream,    (batch: TrainBatch)     (actors)   (engines serve version v + 1)
     buffer)

The policy version is the number of completed updates; it names checkpoints and labels every generated token. What a run
needs besides (time limit, evaluation, saves, report) is in `dapo.driver.session`, which surrounds each part of a step.
"""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from dapo.algorithm.batch import build_batch, penalized
from dapo.config.schema import Config
from dapo.data.order import PromptOrder
from dapo.ground.clock import PhaseClock
from dapo.pools import Pools, Updated
from dapo.sampling.buffer import OversamplingBuffer
from dapo.types import Collected, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A step whose update is done."""

    collected: Collected
    batch: TrainBatch
    updated: Updated


class Stream(Protocol):
    """Where batches come from: `dapo.sampling.stream.GroupStream`, or batches of an earlier run."""

    buffer: OversamplingBuffer

    async def collect(self) -> Collected: ...

    def serving(self, version: int) -> None:
        """The engines serve policy `version` from now on."""


class Around:
    """Runs the parts of a step; a subclass does more before, after and instead."""

    async def collecting(self, collect: Callable[[], Coroutine[Any, Any, Collected]]) -> Collected:
        return await collect()

    async def training(self, collected: Collected, train: Callable[[], Coroutine[Any, Any, Trained]]) -> Trained:
        """Surrounds update and sync. collected: with what the reference policy has changed in the rewards."""
        return await train()

    async def updating(self, update: Callable[[], Awaitable[Updated]]) -> Updated:
        return await update()

    async def syncing(self, trained: Trained, sync: Callable[[], Awaitable[None]]) -> None:
        await sync()


class Trainer:
    def __init__(self, cfg: Config, pools: Pools, order: PromptOrder, stream: Stream, clock: PhaseClock) -> None:
        self.version = 0
        self._cfg = cfg
        self._pools = pools
        self._order = order
        self._stream = stream
        self._clock = clock

    async def step(self, around: Around | None = None) -> Trained:
        """Samples until the batch is full, updates the policy, and gives the engines its weights.

        Raises:
            BatchRefused: the ranks did not train on the batch; nothing has changed.
            ActorsLost: see `dapo.pools.ActorPool`.
        """
        around = around or Around()
        collected = await around.collecting(self._stream.collect)  # lines 2 to 8
        if self._cfg.algorithm.kl.reward_coeff:
            with self._clock("reference"):
                collected = await penalized(collected, self._pools.actors, self._cfg, version=self.version)
        batch = build_batch(collected.groups, self._cfg, version=self.version)  # line 9
        return await around.training(collected, lambda: self._train(collected, batch, around))

    async def _train(self, collected: Collected, batch: TrainBatch, around: Around) -> Trained:
        async with self._pools.weights:
            updated = await around.updating(lambda: self._pools.actors.update(batch))  # lines 10 and 11
            self.version += 1
            self._stream.buffer.trained()
            draws = self._stream.buffer.draws
            self._order.learn(collected.drawn, live=draws.live, settled=draws.settled, version=self.version)
            trained = Trained(collected=collected, batch=batch, updated=updated)
            await around.syncing(trained, lambda: self._pools.sync_weights(self.version))  # line 3 of the next step
            self._stream.serving(self.version)
        return trained
