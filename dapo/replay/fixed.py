"""Stands in for the actors where a run only generates: a policy that never changes.

In: batches, which it leaves as they are. Out: the same version of the weights, whatever the number of the step.
"""

import asyncio
from collections.abc import Sequence

from dapo.pools import Updated
from dapo.types import Float32Array, TrainBatch, TrainSequence


class FixedPolicy:
    """Fulfils `dapo.pools.ActorPool` without a rank, for `trainer.only=rollout`."""

    async def update(self, batch: TrainBatch) -> Updated:
        """Trains on nothing."""
        return Updated(metrics={})

    async def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        """Returns those of the policy, which is its own reference: a divergence of 0."""
        return [sequence.rollout_logprobs for sequence in sequences]

    async def save(self, directory: str, version: int) -> None:
        """Has no state: a checkpoint holds the driver's part alone."""

    async def load(self, directory: str, version: int) -> None:
        """Has no state."""

    async def export_hf(self, directory: str) -> None:
        """Writes nothing: the model is the one at `model.path`."""

    async def stage(self, version: int, *, export: bool) -> None:
        """Has no state."""

    async def write_staged(self, directory: str, export: str) -> None:
        """Has no state."""

    async def check_shared(self, path: str, content: str) -> None:
        """Has no process that could read another directory."""

    def restarts(self) -> dict[str, float]:
        """Returns nothing: there are no processes."""
        return {}

    async def until_lost(self) -> str:
        """Waits for ever: there is nothing to lose."""
        await asyncio.Event().wait()
        return ""

    async def restart(self) -> None:
        """Has no process."""

    async def start(self) -> None:
        """Has no process."""

    def close(self) -> None:
        """Has no process."""
