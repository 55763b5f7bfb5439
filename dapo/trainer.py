"""Runs Algorithm 1 of the paper (arXiv 2503.14476): the loop over rollout steps.

    collect ──▶ advantages, weights ──▶ update ──▶ sync weights ──▶ evaluate, log, checkpoint
    (stream,    (batch: TrainBatch)     (actors)   (engines serve
     buffer)                                        version v + 1)

The trainer knows three protocols and one `sync_weights` callable, so the loop also runs with in-process fakes. The
policy version is the number of completed updates; it names checkpoints and labels every generated token.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dapo.batch import build_batch, has_signal, penalize_kl, reference_batch
from dapo.clock import PhaseClock
from dapo.config.schema import Config
from dapo.data.prompts import PromptOrder
from dapo.evaluate import evaluate, evaluates_after
from dapo.pools import Pools
from dapo.report.log import MetricsLogger, progress_line
from dapo.report.metrics import sample_text, step_metrics
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.stream import GroupStream, sampling_of
from dapo.saving import Saver
from dapo.state.checkpoint import CheckpointStore
from dapo.types import Collected, Prompt, TrainBatch

T = TypeVar("T")


class Trainer:
    """Trains one run."""

    def __init__(
        self,
        cfg: Config,
        pools: Pools,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        store: CheckpointStore,
        logger: MetricsLogger,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.version = 0
        self.clock = PhaseClock()
        self._cfg = cfg
        self._pools = pools
        self._held_out = held_out
        self._logger = logger
        self._say = say
        self._buffer = OversamplingBuffer.of(cfg, lambda group: has_signal(group, cfg))
        self._saver = Saver.of(cfg, store, pools.actors, self._buffer, logger)
        self._order = PromptOrder(prompts, seed=cfg.trainer.seed, shuffle=cfg.data.shuffle)
        self.stream = GroupStream(
            self._order,
            self._buffer,
            pools.rollouts,
            pools.rewards,
            sampling_of(cfg.rollout, cfg.data.max_response_length),
            seed=cfg.trainer.seed,
            clock=self.clock,
        )

    async def run(self) -> None:
        """Takes all steps up to `trainer.total_steps`, from the newest checkpoint if there is one."""
        try:
            await self._resume()
            if self._saver.owes_evaluation or (self._cfg.eval.before_train and self.version == 0):
                await self._evaluate()
            while self.version < self._cfg.trainer.total_steps:
                await self.step()
            if self.unsaved:
                await _finish(self.save())
        finally:
            await self.stream.close()

    async def step(self) -> dict[str, float]:
        """Takes one rollout step and returns its metrics: samples until the batch is full, updates, syncs."""
        self.clock.lap()
        collected = await self.stream.collect()
        if self._cfg.algorithm.kl.reward_coeff:
            collected = await self._penalize_kl(collected)
        batch = build_batch(collected.groups, self._cfg, version=self.version)
        metrics = await _finish(self._update(collected, batch))
        if self._saver.owes_evaluation:
            await self._evaluate()
        if self.version < self._cfg.trainer.total_steps and self._saver.is_due(self.version):
            await _finish(self._saver.save_or_go_on(self.version))
        return metrics

    async def _penalize_kl(self, collected: Collected) -> Collected:
        """Takes the distance to the reference policy off the rewards (accuracies, and so the buffer's choice, stay)."""
        with self.clock("reference"):
            sequences = reference_batch(collected.groups, version=self.version)
            logprobs = await self._pools.actors.reference_logprobs(sequences)
        return replace(collected, groups=penalize_kl(collected.groups, logprobs, self._cfg))

    async def _update(self, collected: Collected, batch: TrainBatch) -> dict[str, float]:
        async with self._pools.weights:
            with self.clock("update"):
                updated = await self._pools.actors.update(batch)
            self.version += 1
            self._buffer.trained()
            self._saver.owes_evaluation = evaluates_after(self.version, self._cfg)
            try:
                with self.clock("sync"):
                    await self._pools.sync_weights(self.version)
                self._buffer.serving(self.version)
            finally:  # the step is trained and will be saved: it has its line also where the sync failed
                restarts = self._pools.rewards.restarts() | self._pools.rollouts.restarts()
                metrics = self._report(collected, batch, updated.metrics | restarts)
        return metrics

    async def _evaluate(self) -> None:
        self._saver.owes_evaluation = bool(self._held_out)
        if not self._held_out:
            return
        sampling = sampling_of(self._cfg.eval, self._cfg.data.max_response_length)
        engines, rewards, seed = self._pools.rollouts, self._pools.rewards, self._cfg.trainer.seed
        metrics = await evaluate(self._held_out, engines, rewards, sampling, seed=seed, clock=self.clock)
        self._logger.log(self.version, metrics)
        self._saver.owes_evaluation = False
        self._say(f"eval · step {self.version} · held-out accuracy {metrics['eval/accuracy']:.3f}")

    def _report(self, collected: Collected, batch: TrainBatch, update: dict[str, float]) -> dict[str, float]:
        metrics = step_metrics(collected, batch, update, self.clock.lap(), self._buffer.metrics())
        self._logger.log(self.version, metrics)
        for index in range(self._cfg.logging.samples):
            self._logger.text(self.version, f"sample/{index}", sample_text(collected, index))
        self._say(progress_line(self.version, self._cfg.trainer.total_steps, metrics))
        return metrics

    @property
    def unsaved(self) -> bool:
        """Returns whether steps were trained, or groups collected, that no checkpoint holds."""
        return self._saver.is_behind(self.version)

    async def save(self) -> None:
        """Writes a checkpoint of the current version, while generation may go on."""
        await self._saver.save(self.version)

    def close(self) -> None:
        """Ends what writes; the last act, after the last save."""
        self._saver.close()

    async def _resume(self) -> None:
        async with self._pools.weights:
            found = await self._saver.resume(self._order.draw, self._pools.rewards)
            self.version = found.version
            if found.where:
                self._say(f"resuming from {found.where}")
            # Always, even at version 0: a broken sync shows before any GPU hour is spent.
            with self.clock("sync"):
                await self._pools.sync_weights(self.version)


async def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end even when the run is being cancelled: a half-done update is no state to save."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result
