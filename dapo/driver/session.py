"""One run around Algorithm 1 (`dapo.trainer`): resumes, evaluates, saves, reports, keeps the time limit, and sets
refused batches aside.

    resume ─▶ sync ─▶ begin evaluation ─▶ step ─▶ begin evaluation ─▶ save if due ─▶ step ─▶ ... ─▶ last save
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from dapo.algorithm.batch import has_signal
from dapo.algorithm.mismatch import LIKELY, PROBES, SAMPLED
from dapo.config.schema import Config
from dapo.data.order import PromptOrder
from dapo.driver.lost_ranks import unless_lost
from dapo.driver.refusals import Refusals
from dapo.evaluation.background import Evaluations
from dapo.ground.clock import PhaseClock
from dapo.ground.console import take_repeated, warn
from dapo.ground.fault_points import fault_point
from dapo.ground.signals import finish
from dapo.ground.time_limit import TimeLimit
from dapo.pools import ActorsLost, BatchRefused, Pools, Updated
from dapo.report.log import MetricsLogger, example, progress_line
from dapo.report.metrics import report_step, step_metrics
from dapo.report.trace import Trace
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.stream import training_sampling
from dapo.state.batches import Batches, stream_of
from dapo.state.checkpoint import CheckpointStore
from dapo.state.saving import Saver
from dapo.trainer import Around, Trained, Trainer
from dapo.types import Collected, Group, HeldOut, Prompt


class Session(Around):
    def __init__(
        self,
        cfg: Config,
        pools: Pools,
        prompts: Sequence[Prompt],
        held_out: Sequence[HeldOut],
        store: CheckpointStore,
        logger: MetricsLogger,
        *,
        say: Callable[[str], None],
        limit: TimeLimit | None = None,
        until: int | None = None,
    ) -> None:
        """until: the last step, if it is not `trainer.total_steps`."""
        self.clock = PhaseClock(Trace(logger.output_dir))
        self._cfg = cfg
        self._pools = pools
        self._logger = logger
        self._say = say
        self._limit = limit or TimeLimit()
        self._until = cfg.trainer.total_steps if until is None else until
        self._collected: Collected | None = None  # what the step under way trains on
        self._metrics: dict[str, float] = {}
        self._shows_example = False  # the first group of a run that begins

        self.evaluations = Evaluations(
            held_out, pools, cfg, logger, clock=self.clock, limit=self._limit, say=say, idle=self._collects_nothing
        )
        self.buffer = OversamplingBuffer.of(
            cfg, lambda group: has_signal(group, cfg), on_scored=lambda *scored: self._scored(*scored)
        )
        self._order = PromptOrder.of(cfg, prompts)
        self.saver = Saver(
            cfg, store, pools.actors, self.buffer, self._order, logger, self._limit, owes=lambda: self.evaluations.owed
        )
        self._refusals = Refusals(cfg, logger.output_dir, self.buffer, self.saver.voided)
        self._batches = Batches.of(cfg, logger.output_dir, self._order.visits_of)
        self.stream = stream_of(cfg, self._order, self.buffer, pools, self.clock, on_filled=self.evaluations.wake)
        self._trainer = Trainer(cfg, pools, self._order, self.stream, self.clock)

    @property
    def version(self) -> int:
        return self._trainer.version

    async def run(self) -> None:
        try:
            await self.resume()
            self.evaluations.begin(self.version)
            while self.version < self._until:
                await self.step()
            await self._batches.written()
            if self.saver.is_behind(self.version):
                await finish(self.save())
            async with self._limit.leaving("save"):  # the checkpoint records that the evaluation is due
                await self.evaluations.finish()
        except ActorsLost:
            await self._batches.written()  # the next session writes the same files
            raise
        finally:
            await self.evaluations.close()
            await self.stream.close()

    async def resume(self) -> None:
        async with self._pools.weights:
            found = await self.saver.resume(self._pools.rewards)
            self._trainer.version = found.version
            if found.owes_evaluation:
                self.evaluations.owe(found.version)
            if found.where:
                self._say(f"resuming from {found.where}")
            self._shows_example = not found.where
        await self._sync()  # always, even at version 0: a broken sync shows before any GPU hour is spent

    def _scored(self, group: Group, started: int) -> None:
        self.saver.scored(group, started)
        if self._shows_example:
            self._shows_example = False
            self._say(example(group))

    async def step(self) -> dict[str, float]:
        """Runs one step and returns its metrics. A batch that the actors refuse is set aside, and the metrics are
        empty. Raises ActorsLost, also after setting aside a batch that lost the ranks."""
        version, self._collected = self.version, None
        try:
            await self._trainer.step(self)
        except BatchRefused as error:
            assert self._collected is not None
            self._refusals.refused(self._collected, error, version)
            await self._sync()
            return {}
        except ActorsLost as error:
            if self._collected is None or self.version > version:  # before the update, or after it
                raise
            raise self._refusals.lost(self._collected, error, version) from error
        self.evaluations.begin(self.version)
        if self.version < self._until:
            self.saver.keep(self.version)
            if self._pools.told.is_set() or self.saver.is_due(self.version):
                await self._save_on_the_way()
        return self._metrics

    async def _save_on_the_way(self) -> None:
        self._pools.told.clear()
        if self.saver.is_behind(self.version):
            with self.clock("save"):
                await finish(self.saver.save_or_go_on(self.version))

    async def _save_when_told(self) -> None:
        while True:
            await self._pools.told.wait()
            await self._save_on_the_way()

    async def save(self) -> None:
        """Writes a checkpoint of the current version; generation may continue meanwhile."""
        with self.clock("save"):
            await self.saver.save(self.version)

    async def collecting(self, collect: Callable[[], Coroutine[Any, Any, Collected]]) -> Collected:
        self.clock.lap()
        self._pools.lap()
        when_told = asyncio.ensure_future(self._save_when_told())
        try:
            async with self._limit.leaving(*self.saver.acts):
                collected = await unless_lost(collect(), self._pools.actors)
        finally:
            when_told.cancel()
            await asyncio.wait([when_told])  # a save that has begun ends first
        if not when_told.cancelled():
            when_told.result()
        await self.saver.kept()  # a loss in it is not the batch's
        await self._batches.put(self.version + 1, collected.groups)
        await finish(self.evaluations.leave_gpus(), hurry=self.evaluations.give_up)
        self._collected = collected
        return collected

    async def training(self, collected: Collected, train: Callable[[], Coroutine[Any, Any, Trained]]) -> Trained:
        self._collected = collected
        self._limit.check("update", *self.saver.acts)
        return await finish(self._to_its_end(train), hurry=self.evaluations.give_up)

    async def _to_its_end(self, train: Callable[[], Coroutine[Any, Any, Trained]]) -> Trained:
        trained = await train()
        fault_point("driver.synced")
        self._refusals.updated(trained.collected, trained.updated, self.version - 1)
        return trained

    async def updating(self, update: Callable[[], Awaitable[Updated]]) -> Updated:
        fault_point("driver.collected")
        await self.saver.copied()
        with self._limit.measuring("update"), self.clock("update"):
            updated = await update()
        fault_point("driver.updated")
        return updated

    async def syncing(self, trained: Trained, sync: Callable[[], Awaitable[None]]) -> None:
        mismatch: dict[str, float] = {}
        try:
            await self.evaluations.trained(self.version)
            with self.clock("sync"):
                await sync()
                mismatch = await self._mismatch(trained)
        finally:  # the step is trained and will be saved, so it is logged even if the sync failed
            self._report(trained, mismatch)

    async def _mismatch(self, trained: Trained) -> dict[str, float]:
        """Returns why engines and actors differ, at the steps of `weight_sync.compare_every`."""
        every, compare = self._cfg.weight_sync.compare_every, self._pools.compare
        if compare is None or not every or self.version % every:
            return {}
        sampling = training_sampling(self._cfg)
        most = min(SAMPLED, sampling.max_tokens)
        likely = sampling.support if sampling.truncates else LIKELY
        sampling = replace(sampling, n=1, max_tokens=most, support=likely, support_logprobs=True)
        prompts = [group.draw.prompt.token_ids for group in trained.collected.groups[:PROBES]]
        stale = trained.updated.metrics.get("parity/mean_abs_logprob_diff", 0.0)
        try:
            return await compare(prompts, sampling, self.version * PROBES, stale)
        except ActorsLost:
            raise
        except RuntimeError as error:
            warn(f"`weight_sync.compare_every`: engines and actors were not compared: {error}")
            return {}

    def _report(self, trained: Trained, mismatch: dict[str, float]) -> None:
        update = trained.updated.metrics | mismatch | self._order.metrics() | self._pools.lap()
        seconds, totals = self.clock.lap(), self.buffer.metrics()
        collected, gpus = trained.collected, self._pools.gpus
        metrics = step_metrics(collected, trained.batch, update, seconds, totals, gpus=gpus)
        report_step(self._logger, self.version, metrics, collected, samples=self._cfg.logging.samples)
        self._say(progress_line(self.version, self._cfg.trainer.total_steps, metrics, repeated=take_repeated()))
        self._metrics = metrics

    async def _sync(self) -> None:
        """Syncs the weights again: outdated engine weights may be the reason for a refused batch."""
        await self.evaluations.again()
        async with self._pools.weights:
            with self.clock("sync"):
                await self._pools.sync_weights(self.version)

    def _collects_nothing(self, version: int) -> bool:
        return version >= self._cfg.trainer.total_steps or self.saver.is_due(version)
