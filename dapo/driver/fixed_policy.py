"""Replaces the actors when a run only generates: a policy that never changes."""

import asyncio
from collections.abc import Sequence

from dapo.pools import Kept, Updated
from dapo.types import Float32Array, TrainBatch, TrainSequence


class FixedPolicy:
    """Implements `dapo.pools.ActorPool` without ranks, for `trainer.only=rollout`."""

    async def update(self, batch: TrainBatch) -> Updated:
        return Updated(metrics={})

    async def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        """Returns the policy's own log-probabilities: it is its own reference, with a divergence of 0."""
        return [sequence.rollout_logprobs for sequence in sequences]

    async def save(self, directory: str, version: int) -> None:
        """No state: the checkpoint has only the driver's part."""

    async def load(self, directory: str, version: int) -> None: ...

    async def export_hf(self, directory: str) -> None:
        """Writes nothing: the model is the one at `model.path`."""

    async def stage(self, version: int, *, export: bool) -> None: ...

    async def write_staged(self, directory: str, export: str) -> None: ...

    async def keep(self, version: int) -> Kept:
        return Kept(version=version)

    async def restore(self, kept: Kept) -> str:
        return ""

    async def check_shared(self, path: str, content: str) -> None: ...

    def restarts(self) -> dict[str, float]:
        return {}

    async def until_lost(self) -> str:
        """Never returns: there is nothing to lose."""
        await asyncio.Event().wait()
        return ""

    async def restart(self) -> None: ...

    async def find(self) -> None: ...

    def gpus(self, ranks: Sequence[int]) -> list[str]:
        return []

    async def start(self) -> None: ...

    def close(self) -> None: ...
