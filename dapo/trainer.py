"""Algorithm 1 of the paper (arXiv 2503.14476): the loop over rollout steps.

    collect ──▶ advantages, weights ──▶ update ──▶ sync weights ──▶ log, checkpoint
    (stream,    (batch: TrainBatch)     (actors)   (engines serve
     buffer)                                        version v + 1)
       └ ─ ─ ─ ─ evaluation of version v ─ ─ ─┘

The trainer uses three protocols and one `sync_weights` callable, so the loop also runs with in-process fakes. The
policy version is the number of completed updates; it names checkpoints and labels every generated token.
"""

from collections.abc import Callable, Sequence

from dapo.batch import build_batch, has_signal, penalized
from dapo.config.schema import Config
from dapo.data.order import PromptOrder
from dapo.evaluate.aside import Evaluations
from dapo.faults.limit import TimeLimit
from dapo.faults.losses import unless_lost
from dapo.faults.points import fault_point
from dapo.faults.refusals import Refusals
from dapo.faults.signals import finish
from dapo.measure.clock import PhaseClock
from dapo.pools import ActorsLost, BatchRefused, Pools
from dapo.replay.batches import Batches, stream_of
from dapo.report.console import take_repeated
from dapo.report.log import MetricsLogger, progress_line
from dapo.report.metrics import report_step, step_metrics
from dapo.report.trace import Trace
from dapo.sampling.buffer import OversamplingBuffer
from dapo.state.checkpoint import CheckpointStore
from dapo.state.saving import Saver
from dapo.types import Collected, HeldOut, Prompt, TrainBatch


class Trainer:
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
        self.version = 0
        self.clock = PhaseClock(Trace(logger.output_dir))
        self._cfg = cfg
        self._pools = pools
        self._logger = logger
        self._say = say
        self._limit = limit or TimeLimit()
        self._buffer = OversamplingBuffer.of(cfg, lambda group: has_signal(group, cfg))
        self._order = PromptOrder.of(cfg, prompts)
        self.saver = Saver(cfg, store, pools.actors, self._buffer, self._order, logger, self._limit)
        self._refusals = Refusals(cfg, logger.output_dir, self._buffer, self.saver.voided)
        self.stream = stream_of(cfg, self._order, self._buffer, pools, self.clock)
        self._batches = Batches.of(cfg, logger.output_dir, self._order.visits_of)
        self._until = cfg.trainer.total_steps if until is None else until
        self.evaluations = Evaluations(
            held_out, pools, cfg, self.saver, logger, clock=self.clock, limit=self._limit, say=say
        )
        self.stream.on_filled = self.evaluations.wake

    async def run(self) -> None:
        try:
            await self._resume()
            self.evaluations.begin(self.version)
            while self.version < self._until:
                await self.step()
            await self._batches.written()
            if self.saver.is_behind(self.version):
                await finish(self.save())
            async with self._limit.leaving("save"):  # the checkpoint records that the evaluation is due
                await self.evaluations.finish()
        except ActorsLost:
            await self._batches.written()  # the next trainer writes the same files
            raise
        finally:
            await self.evaluations.close()
            await self.stream.close()

    async def step(self) -> dict[str, float]:
        """Runs one rollout step and returns its metrics: samples until the batch is full, updates, syncs. A batch that
        the actors refuse is set aside, and the metrics are empty. Raises ActorsLost, also after setting aside a batch
        that lost the ranks."""
        self.clock.lap()
        self._pools.lap()
        async with self._limit.leaving(*self.saver.acts):
            collected = await unless_lost(self.stream.collect(), self._pools.actors)
        await self._batches.put(self.version + 1, collected.groups)
        await finish(self.evaluations.leave_gpus(), hurry=self.evaluations.give_up)
        version = self.version
        try:
            if self._cfg.algorithm.kl.reward_coeff:
                with self.clock("reference"):
                    collected = await penalized(collected, self._pools.actors, self._cfg, version=version)
            batch = build_batch(collected.groups, self._cfg, version=version)
            self._limit.check("update", *self.saver.acts)
            metrics = await finish(self._update(collected, batch), hurry=self.evaluations.give_up)
        except BatchRefused as error:
            self._refusals.refused(collected, error, version)
            await self._sync()
            return {}
        except ActorsLost as error:
            if self.version > version:  # after the update
                raise
            raise self._refusals.lost(collected, error, version) from error
        self.evaluations.begin(self.version)
        if self.version < self._until and self.saver.is_due(self.version):
            with self.clock("save"):
                await finish(self.saver.save_or_go_on(self.version))
        return metrics

    async def _update(self, collected: Collected, batch: TrainBatch) -> dict[str, float]:
        async with self._pools.weights:
            fault_point("driver.collected")
            await self.saver.copied()
            with self._limit.measuring("update"), self.clock("update"):
                updated = await self._pools.actors.update(batch)
            fault_point("driver.updated")
            self.version += 1
            self._buffer.trained()
            draws = self._buffer.draws
            self._order.learn(collected.drawn, live=draws.live, settled=draws.settled, version=self.version)
            try:
                await self.evaluations.trained(self.version)
                with self.clock("sync"):
                    await self._pools.sync_weights(self.version)
                self._buffer.serving(self.version)
            finally:  # the step is trained and will be saved, so it is logged even if the sync failed
                metrics = self._report(collected, batch, updated.metrics | self._order.metrics() | self._pools.lap())
        fault_point("driver.synced")
        self._refusals.updated(collected, updated, self.version - 1)
        return metrics

    async def _sync(self) -> None:
        """Syncs the weights again: outdated engine weights may be the reason for a refused batch."""
        await self.evaluations.again()
        async with self._pools.weights:
            with self.clock("sync"):
                await self._pools.sync_weights(self.version)

    def _report(self, collected: Collected, batch: TrainBatch, update: dict[str, float]) -> dict[str, float]:
        seconds, totals = self.clock.lap(), self._buffer.metrics()
        metrics = step_metrics(collected, batch, update, seconds, totals, gpus=self._pools.gpus)
        report_step(self._logger, self.version, metrics, collected, samples=self._cfg.logging.samples)
        self._say(progress_line(self.version, self._cfg.trainer.total_steps, metrics, repeated=take_repeated()))
        return metrics

    async def save(self) -> None:
        """Writes a checkpoint of the current version; generation may continue meanwhile."""
        with self.clock("save"):
            await self.saver.save(self.version)

    async def _resume(self) -> None:
        async with self._pools.weights:
            found = await self.saver.resume(self._pools.rewards)
            self.version = found.version
            if found.where:
                self._say(f"resuming from {found.where}")
        await self._sync()  # always, even at version 0: a broken sync shows before any GPU hour is spent
