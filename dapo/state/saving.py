"""Saves a run to disk and resumes it: which part writes which files of a checkpoint.

A checkpoint (`dapo.state.checkpoint`) has `actor/` (ranks), `hf/` (the exported model) and the driver's part
(this module). Groups that finish between two checkpoints go to a journal (`dapo.state.groups`).

    capture (driver's state) ─▶ ranks write ────────────────────────────▶ sealed, in its place, `LATEST`
    the same, async_save:    ─▶ ranks copy to host memory ─▶ they write the copy beside the next step ─▶ the same
    the same, memory_copies: ─▶ ranks copy to the memory of their nodes, after each step, for lost ranks of this run
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dapo.config.schema import Config
from dapo.data.order import PromptOrder, SavedOrder
from dapo.ground.console import warn
from dapo.ground.durable import free_space
from dapo.ground.signals import finish
from dapo.ground.time_limit import TimeLimit
from dapo.ground.watchdog import waiting
from dapo.pools import ActorPool, ActorsLost, Kept, RewardPool
from dapo.report.log import MetricsLogger
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.stream import score_of, training_sampling
from dapo.state.checkpoint import CheckpointStore
from dapo.state.driver_state import DriverState, Due
from dapo.state.groups import FILE, note, read_groups, recover, write_groups
from dapo.state.journal import JOURNAL, Journal
from dapo.state.lease import LeaseLost
from dapo.state.voided import Voided
from dapo.types import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The driver's part of a checkpoint, captured at one moment. order: prompt order with the prompt history. held:
    groups, each with the policy version at its start."""

    state: DriverState
    order: SavedOrder
    held: list[tuple[Group, int]]

    def write(self, directory: Path) -> None:
        """Writes all files, `driver.json` last."""
        write_groups(directory / FILE, self.held)
        self.order.write(directory)
        self.state.write(directory)

    @classmethod
    def read(cls, directory: Path, order: PromptOrder, *, history: bool) -> "Captured":
        """Reads what `write` wrote. order: whose draws the groups have; restored here if `history`."""
        state = DriverState.read(directory)
        if history:
            order.restore(directory, version=state.version)
        return cls(state=state, order=order.saved(), held=read_groups(directory / FILE, order.draw))


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Where a run continues. source: the checkpoint or what the nodes hold in memory; empty without either, and
    `version` is 0. journaled: number of groups that finished after it. owes_evaluation: of its policy."""

    version: int
    source: str
    journaled: int
    owes_evaluation: bool

    @property
    def where(self) -> str:
        journal = f"{self.journaled} groups of the journal" if self.journaled else ""
        return " and ".join([part for part in (self.source, journal) if part])


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; the ranks and the previous checkpoint are unchanged."""


class Saver:
    """Saves one run, one checkpoint at a time. journal: groups since the last save began. voided: groups that must not
    be trained on."""

    def __init__(
        self,
        cfg: Config,
        store: CheckpointStore,
        actors: ActorPool,
        buffer: OversamplingBuffer,
        order: PromptOrder,
        logger: MetricsLogger,
        limit: TimeLimit,
        *,
        owes: Callable[[], bool] = lambda: False,
    ) -> None:
        """Needs an unused buffer, which calls `scored`. limit: receives the duration of each save. owes: whether the
        actors' policy has to be evaluated."""
        sampling = training_sampling(cfg)
        settings = f"{sampling} {cfg.trainer.seed}"
        self.journal = Journal(logger.output_dir / JOURNAL, settings, warn=warn)
        self.voided = Voided(logger.output_dir, warn=warn)
        self._owes = owes
        self._cfg = cfg.checkpoint
        self._max_staleness = cfg.filter_groups.max_staleness
        self._store = store
        self._actors = actors
        self._buffer = buffer
        self._order = order
        self._logger = logger
        self._limit = limit
        self._version = 0
        self._groups: set[tuple[int, int]] = set()  # (draw, policy version at its start)
        self._failed = 0  # consecutive saves
        self._tried_at = time.monotonic()
        self._running: asyncio.Task[None] | None = None  # an asynchronous save
        self._copied = asyncio.Event()  # the save no longer needs the actors' state
        self._keeping: asyncio.Task[None] | None = None
        self.near: tuple[Captured, Kept] | None = None  # outlives this object; `dapo.driver.recovery` hands it on

    def scored(self, group: Group, started: int) -> None:
        """Notes a group in the journal. started: the policy version at its start."""
        if self._cfg.journal:
            note(self.journal, group, started)

    @property
    def acts(self) -> tuple[str, ...]:
        """What is left to do before the run may end, for its time limit: a save, after any save under way."""
        return ("save", "save") if self._is_running() else ("save",)

    def _is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    def is_behind(self, version: int) -> bool:
        """Whether policy `version` or a buffered group is in no complete checkpoint."""
        return version > self._version or not _names(self._buffer.held()) <= self._groups

    def is_due(self, version: int) -> bool:
        """Whether to save policy `version`, by its step number or by the time since the last save ended."""
        every, every_s = self._cfg.every, self._cfg.every_s
        by_time = every_s > 0 and not self._is_running() and time.monotonic() - self._tried_at >= every_s
        return version > self._version and (by_time or (every > 0 and version % every == 0))

    async def save_or_go_on(self, version: int) -> None:
        """Saves policy `version` after the previous save has ended. With `checkpoint.async_save`, returns once the save
        has begun. A failure is reported and the run continues.

        Raises:
            SaveFailed: more than `checkpoint.max_failed_saves` consecutive saves failed.
            ActorsLost: see `dapo.pools.ActorPool`. For an asynchronous save, the next call raises either.
        """
        await self._ended()
        saving = self._write_or_tell(self._capture(version))
        if not self._cfg.async_save:
            await saving
            return
        self._copied.clear()
        self._running = asyncio.create_task(saving)

    async def copied(self) -> None:
        """Waits until the save under way no longer needs the actors' state; call before that state changes."""
        if self._is_running():
            await self._copied.wait()

    def keep(self, version: int) -> None:
        """Begins to copy policy `version` into the memory of the nodes, with `checkpoint.memory_copies`."""
        if self._cfg.memory_copies and version:
            # Journal segments of policies that no checkpoint knows help only what is kept in memory.
            needed = version if self._is_running() else self._version + self._max_staleness
            self._keeping = asyncio.create_task(self._keep(self._capture(version), needed))

    async def kept(self) -> None:
        """Waits until `keep` no longer needs the actors' state. Raises ActorsLost."""
        if self._keeping is not None:
            await self._keeping

    async def _keep(self, captured: Captured, needed: int) -> None:
        """needed: the last version whose journal segment a checkpoint needs."""
        version = captured.state.version
        try:
            self.near = captured, await self._actors.keep(version)
        except ActorsLost:
            raise
        except RuntimeError as error:
            warn(f"`checkpoint.memory_copies`: step {version} is not in the memory of the nodes: {error}")
            return
        self.journal.prune(version, after=needed)

    async def save(self, version: int) -> None:
        """Writes the final checkpoint of a run, unless the save under way already has everything. Raises as
        `save_or_go_on` does, and SaveFailed at the first failure."""
        try:
            waited = await self._ended()
        except SaveFailed as error:
            warn(f"{error}; it is tried once more")
            waited = False
        if not waited or self.is_behind(version):
            await self._write(self._capture(version), at_once=True)

    async def _ended(self) -> bool:
        if (running := self._running) is None:
            return False
        await asyncio.wait([running])
        self._running = None
        running.result()
        return True

    async def abandon(self) -> None:
        """Cancels the save under way: the ranks that write it are lost. A save whose files are all written is kept."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled() and (error := running.exception()):
                warn(str(error))
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    def _capture(self, version: int) -> Captured:
        """Captures the driver's part of a checkpoint, and begins the next journal segment at the same moment."""
        due = Due(evaluate=self._owes(), lines=self._logger.unwritten())
        state = DriverState(version=version, buffer=self._buffer.state(), due=due)
        captured = Captured(state=state, order=self._order.saved(), held=self._buffer.held())
        if self._cfg.journal:
            self.journal.begin(version)
        return captured

    async def _write_or_tell(self, captured: Captured) -> None:
        try:
            await self._write(captured, at_once=not self._cfg.async_save)
        except SaveFailed as error:
            if self._failed > self._cfg.max_failed_saves:
                raise
            warn(f"{error} (failure {self._failed} of {self._cfg.max_failed_saves} that the run may have in a row)")

    async def _write(self, captured: Captured, *, at_once: bool) -> None:
        """Writes a checkpoint. at_once: directly from the actors, which wait meanwhile.

        Raises:
            SaveFailed: the disk or all ranks alike failed; nothing of the checkpoint is left, and the run may continue.
            ActorsLost: see `dapo.pools.ActorPool`.
        """
        version = captured.state.version
        try:
            with self._limit.measuring("save"):
                async with self._store.writing(version) as directory:
                    await self._write_actors(directory, version, at_once=at_once)
                    await asyncio.to_thread(captured.write, directory)
                    await asyncio.to_thread(self._logger.flush)
        except (ActorsLost, LeaseLost):
            raise
        except (OSError, RuntimeError) as error:
            self._failed += 1
            self._logger.event("failed_save", f"step {version}")
            raise SaveFailed(
                f"step {version} could not be saved in `trainer.output_dir` ({self._logger.output_dir}): "
                f"{type(error).__name__}: {error}; see that the directory can be written to and that there "
                f"is space ({free_space(self._logger.output_dir)} without it); the checkpoint before this one stays"
            ) from error
        finally:
            self._copied.set()  # also if the save failed before
            self._tried_at = time.monotonic()
        self._version, self._groups, self._failed = version, _names(captured.held), 0
        self._logger.event("save", f"step {version}")
        self.journal.prune(min(self._store.steps(), default=version))

    async def _write_actors(self, directory: Path, version: int, *, at_once: bool) -> None:
        actor, export = str(directory / "actor"), str(directory / "hf")
        if not at_once:
            await self._actors.stage(version, export=self._cfg.hf_export)
            self._copied.set()
            await self._actors.write_staged(actor, export)
            return
        await self._actors.save(actor, version)
        if self._cfg.hf_export:
            await self._actors.export_hf(export)

    async def resume(self, rewards: RewardPool) -> Resumed:
        """Loads what the nodes hold in memory, or the newest checkpoint, into actors and buffer, and the groups of the
        journal that finished after it. Without either, loads only the journal of the untrained policy. Call once,
        before anything else, also for a new run.

        Groups are scored again: scoring is cheap, and old scores may be why the run stopped. Groups that were set aside
        are skipped. Raises ValueError if files cannot be read.
        """
        await asyncio.to_thread(self.voided.read)
        captured, source = await self._from_memory() or await self._from_disk()
        state, held = captured.state, captured.held
        keeps_groups = self.near is not None or self._store.keeps_groups
        if not keeps_groups:  # their meaning has changed
            self.journal.remove()
            if held:
                warn(f"{len(held)} groups of {source} are generated again: what they mean has changed")
        out = {group.draw.index for group, _ in held if not keeps_groups or self.voided.holds(group)}
        if out:  # their draws start again
            state = state.without(sorted(out))
            held = [(group, started) for group, started in held if group.draw.index not in out]
        # Finished even when cancelled: `close` must not run while the journal is being opened.
        with waiting("the groups of the journal to be read"):
            since = await finish(asyncio.to_thread(self._recover, state, len(held)))
        groups = await asyncio.gather(*[_scored_anew(group, rewards) for group, _ in (*held, *since)])
        scored = [(group, started) for group, (_, started) in zip(groups, (*held, *since), strict=True)]
        self._buffer.restore(
            state.buffer,
            scored[: len(held)],
            scored[len(held) :],
            version=state.version,
            refusals=self.voided.refusals,
        )
        self._version = state.version
        self._groups = _names(self._buffer.held()) & _names(held)
        if self.near is not None:  # which no later start finds
            self._version, self._groups = max(self._store.steps(), default=0), set()
        self._logger.resume(state.version, state.due.lines)
        owed = state.owes_evaluation(self._logger.output_dir)
        return Resumed(version=state.version, source=source, journaled=len(since), owes_evaluation=owed)

    async def _from_memory(self) -> tuple[Captured, str] | None:
        """Loads what an earlier trainer of this run has kept into actors and order; returns it, and where it was."""
        near, self.near = self.near, None
        if near is None or near[1].version < max(self._store.steps(), default=0):
            return None
        captured, kept = near
        try:
            source = await self._actors.restore(kept)
        except ActorsLost:  # the next attempt reads the checkpoint
            raise
        except RuntimeError as error:
            warn(f"step {kept.version} is not whole in the memory of the nodes: {error}; going on from the checkpoint")
            return None
        self.near = near
        self._order.take(captured.order, version=kept.version)
        return captured, f"step {kept.version} in the memory of the nodes ({source})"

    async def _from_disk(self) -> tuple[Captured, str]:
        with waiting("the newest checkpoint to be found and hashed"):  # minutes if this process wrote it
            directory = await asyncio.to_thread(self._store.latest)
        if directory is None:
            state = DriverState(version=0, buffer=self._buffer.state())
            return Captured(state=state, order=self._order.saved(), held=[]), ""
        await self._actors.load(str(directory / "actor"), DriverState.read(directory).version)
        history = self._store.keeps_history
        return await asyncio.to_thread(Captured.read, directory, self._order, history=history), str(directory)

    def _recover(self, state: DriverState, held: int) -> list[tuple[Group, int]]:
        if self._cfg.journal:
            void = self.voided.holds
            return recover(self.journal, state.buffer, held, self._order.draw, version=state.version, void=void)
        self.journal.remove()  # a later run must not take it for its own
        return []

    def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        self.journal.close()


def _names(groups: Sequence[tuple[Group, int]]) -> set[tuple[int, int]]:
    return {(group.draw.index, started) for group, started in groups}


async def _scored_anew(group: Group, rewards: RewardPool) -> Group:
    prompt, responses = group.draw.prompt, enumerate(group.responses)
    scores = await asyncio.gather(*[score_of(prompt, sample, response, rewards) for sample, response in responses])
    return replace(group, scores=tuple(scores))
