"""Writes a run to disk and reads it back: who writes which part of a checkpoint, and how a run continues from one.

In: actors, buffer and stream of draws of a run. Out: directories of `dapo.state.checkpoint` that hold `actor/` (ranks),
`hf/` (the exported model), `driver.json` and `groups.parquet` (`dapo.sampling.saved`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dapo.pools import ActorPool, RewardPool
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.saved import DriverState, read_groups, write_groups
from dapo.state.checkpoint import CheckpointStore
from dapo.types import Draw, Group


class Saver:
    """Saves one run, and knows what the last checkpoint holds."""

    def __init__(
        self, store: CheckpointStore, actors: ActorPool, buffer: OversamplingBuffer, *, hf_export: bool
    ) -> None:
        self._store = store
        self._actors = actors
        self._buffer = buffer
        self._hf_export = hf_export
        self._version = 0
        self._groups: set[tuple[int, int]] = set()  # (draw, policy version at its start)

    def is_behind(self, version: int) -> bool:
        """Returns whether policy `version`, or a group that the buffer holds, is in no checkpoint."""
        return version > self._version or not self._held() <= self._groups

    def _held(self) -> set[tuple[int, int]]:
        return {(group.draw.index, started) for group, started in self._buffer.held()}

    async def save(self, version: int) -> None:
        """Writes a checkpoint of policy `version`, while generation may go on."""
        held, groups = self._buffer.held(), self._held()
        state = DriverState(version=version, buffer=self._buffer.state())
        async with self._store.writing(version) as directory:
            await self._actors.save(str(directory / "actor"), version)
            if self._hf_export:
                await self._actors.export_hf(str(directory / "hf"))
            await asyncio.to_thread(write_groups, directory, held)
            state.write(directory)
        self._version, self._groups = version, groups

    async def resume(self, draw: Callable[[int], Draw], rewards: RewardPool) -> tuple[int, Path] | None:
        """Loads the newest checkpoint into actors and buffer, and returns its version and directory; None without one.

        The groups are scored anew: verdicts are cheap, and the old ones may be why the run stopped.
        """
        directory = self._store.latest()
        if directory is None:
            return None
        state = DriverState.read(directory)
        await self._actors.load(str(directory / "actor"), state.version)
        held = read_groups(directory, draw)
        groups = await asyncio.gather(*[_scored_anew(group, rewards) for group, _ in held])
        started = [version for _, version in held]
        self._buffer.restore(state.buffer, list(zip(groups, started, strict=True)), version=state.version)
        self._version, self._groups = state.version, self._held()
        return state.version, directory


async def _scored_anew(group: Group, rewards: RewardPool) -> Group:
    prompt, responses = group.draw.prompt, enumerate(group.responses)
    scores = await asyncio.gather(*[rewards.score(prompt, sample, response) for sample, response in responses])
    return replace(group, scores=tuple(scores))
