"""Writes a run to disk and reads it back: who writes which part of a checkpoint, and how a run continues from one.

In: actors, buffer and stream of draws of a run. Out: directories of `dapo.state.checkpoint` that hold `actor/` (ranks),
`hf/` (the exported model), `driver.json` and `groups.parquet` (`dapo.sampling.saved`); and between two of them a
journal of the groups that finished since (`dapo.sampling.journaled`).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dapo.config.schema import CheckpointConfig, Config
from dapo.faults.signals import finish
from dapo.pools import ActorPool, ActorsLost, RewardPool
from dapo.report.console import warn
from dapo.report.log import MetricsLogger
from dapo.report.watchdog import waiting
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.driver_state import DriverState, Due, owes_evaluation
from dapo.sampling.journaled import note, recover
from dapo.sampling.saved import read_groups, write_groups
from dapo.sampling.stream import sampling_of
from dapo.state.checkpoint import CheckpointStore
from dapo.state.journal import JOURNAL, Journal
from dapo.state.lease import LeaseLost
from dapo.types import Draw, Group


class SaveFailed(RuntimeError):
    """Says that a checkpoint could not be written; the ranks are as they were, and so is the checkpoint before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Says where a run goes on. directory: the checkpoint; None: there is none, and `version` is 0. groups: how many it
    holds. journaled: how many finished after it."""

    version: int
    directory: Path | None
    groups: int
    journaled: int

    @property
    def where(self) -> str:
        """Returns words for it; "" for a run that begins."""
        journal = f"{self.journaled} groups of the journal" if self.journaled else ""
        return " and ".join([str(part) for part in (self.directory, journal) if part])


class Saver:
    """Saves one run, and knows what the last checkpoint holds.

    owes_evaluation: the policy of now is still to be evaluated, so that a run which goes on from a checkpoint of it
    does that first; set by the trainer.
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        store: CheckpointStore,
        actors: ActorPool,
        buffer: OversamplingBuffer,
        journal: Journal,
        logger: MetricsLogger,
    ) -> None:
        """Makes one for an unused buffer."""
        self.owes_evaluation = False
        self._cfg = cfg
        self._store = store
        self._actors = actors
        self._buffer = buffer
        self._journal = journal
        self._logger = logger
        self._version = 0
        self._groups: set[tuple[int, int]] = set()  # (draw, policy version at its start)
        self._failed = 0  # saves in a row
        self._tried_at = time.monotonic()
        if cfg.journal:
            buffer.on_scored = lambda group, started: note(journal, group, started)

    @classmethod
    def of(
        cls, cfg: Config, store: CheckpointStore, actors: ActorPool, buffer: OversamplingBuffer, logger: MetricsLogger
    ) -> "Saver":
        """Makes one with its journal next to the metrics."""
        sampling = sampling_of(cfg.rollout, cfg.data.max_response_length)
        settings = f"{cfg.model.path} {sampling} {cfg.trainer.seed}"
        journal = Journal(logger.output_dir / JOURNAL, settings, warn=warn)
        return cls(cfg.checkpoint, store, actors, buffer, journal, logger)

    def is_behind(self, version: int) -> bool:
        """Returns whether policy `version`, or a group that the buffer holds, is in no checkpoint."""
        return version > self._version or not self._held() <= self._groups

    def is_due(self, version: int) -> bool:
        """Returns whether policy `version` is to be saved by the number of its step, or by the time since the last
        save."""
        every, every_s = self._cfg.every, self._cfg.every_s
        by_time = every_s > 0 and time.monotonic() - self._tried_at >= every_s
        return version > self._version and (by_time or (every > 0 and version % every == 0))

    def _held(self) -> set[tuple[int, int]]:
        return {(group.draw.index, started) for group, started in self._buffer.held()}

    async def save_or_go_on(self, version: int) -> bool:
        """Saves as `save` does and returns whether it did; a failure is told, and raised where
        `checkpoint.max_failed_saves` in a row came before it."""
        try:
            await self.save(version)
        except SaveFailed as error:
            if self._failed > self._cfg.max_failed_saves:
                raise
            warn(f"{error} (failure {self._failed} of {self._cfg.max_failed_saves} that the run may have in a row)")
            return False
        return True

    async def save(self, version: int) -> None:
        """Writes a checkpoint of policy `version`, while generation may go on.

        Raises:
            SaveFailed: the disk, or all ranks alike, refused; nothing of it is left, and the run may go on.
            ActorsLost: see `dapo.pools.ActorPool`.
        """
        held, groups = self._buffer.held(), self._held()
        due = Due(evaluate=self.owes_evaluation, lines=self._logger.unwritten())
        state = DriverState(version=version, buffer=self._buffer.state(), due=due)
        if self._cfg.journal:
            self._journal.begin(version)
        try:
            async with self._store.writing(version) as directory:
                await self._actors.save(str(directory / "actor"), version)
                if self._cfg.hf_export:
                    await self._actors.export_hf(str(directory / "hf"))
                await asyncio.to_thread(write_groups, directory, held)
                await asyncio.to_thread(self._logger.flush)
                state.write(directory)
        except (ActorsLost, LeaseLost):
            raise
        except (OSError, RuntimeError) as error:
            self._failed += 1
            raise SaveFailed(
                f"step {version} could not be saved in `trainer.output_dir` ({self._logger.output_dir}): "
                f"{type(error).__name__}: {error}; see that there is space and that the directory can be written to; "
                "the checkpoint before this one stays"
            ) from error
        finally:
            self._tried_at = time.monotonic()
        self._version, self._groups, self._failed = version, groups, 0
        self._logger.event("save", f"step {version}")
        self._journal.prune(min(self._store.steps(), default=version))

    async def resume(self, draw: Callable[[int], Draw], rewards: RewardPool) -> Resumed:
        """Loads the newest checkpoint into actors and buffer, and the groups of the journal that finished after it;
        without a checkpoint, the journal of the untrained policy alone. The metrics go on from there. Call it once,
        also for a run that begins, before anything else.

        The groups are scored anew: verdicts are cheap, and the old ones may be why the run stopped.
        """
        directory = self._store.latest()
        state = DriverState(version=0, buffer=self._buffer.state())
        held: list[tuple[Group, int]] = []
        if directory is not None:
            state = DriverState.read(directory)
            await self._actors.load(str(directory / "actor"), state.version)
            held = await asyncio.to_thread(read_groups, directory, draw)
        if not self._store.keeps_groups:  # they mean something else by now: their draws start again
            self._journal.remove()
            state, held = state.without([group.draw.index for group, _ in held]), []
        # To its end, also when cancelled: `close` must not meet a journal that is being opened.
        with waiting("the groups of the journal to be read"):
            since = await finish(asyncio.to_thread(self._recover, state, len(held), draw))
        groups = await asyncio.gather(*[_scored_anew(group, rewards) for group, _ in (*held, *since)])
        scored = [(group, started) for group, (_, started) in zip(groups, (*held, *since), strict=True)]
        self._buffer.restore(state.buffer, scored[: len(held)], scored[len(held) :], version=state.version)
        self._version = state.version
        self._groups = self._held() & {(group.draw.index, started) for group, started in held}
        self._logger.resume(state.version, state.due.lines)
        self.owes_evaluation = directory is not None and owes_evaluation(directory, self._logger.output_dir)
        return Resumed(version=state.version, directory=directory, groups=len(held), journaled=len(since))

    def _recover(self, state: DriverState, held: int, draw: Callable[[int], Draw]) -> list[tuple[Group, int]]:
        if self._cfg.journal:
            return recover(self._journal, state.buffer, held, draw, version=state.version)
        self._journal.remove()  # a later run must not take it for its own
        return []

    def close(self) -> None:
        """Ends the journal, with all its groups on disk; may be called twice."""
        self._journal.close()


async def _scored_anew(group: Group, rewards: RewardPool) -> Group:
    prompt, responses = group.draw.prompt, enumerate(group.responses)
    scores = await asyncio.gather(*[rewards.score(prompt, sample, response) for sample, response in responses])
    return replace(group, scores=tuple(scores))
