"""One update of the policy on one FSDP rank: mini-batches of packed sequences come in, metrics over all ranks go out.

Each mini-batch is one optimizer step on DAPO's objective (`dapo.loss`, Eqs. 8-12; DESIGN sections 5 and 7). All ranks
decide alike, because every decision is taken on totals that all of them have gathered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dapo.config import Config
from dapo.loss import policy_loss
from dapo.types import TrainSequence
from workers.policy import MicroBatch, PackedPolicy, collate

MAX_SKIPPED_IN_A_ROW = 3
NUM_SUMS = 8  # the fields of Totals that add up; the others are maxima


class WeightParityError(RuntimeError):
    """The engines sampled from other probabilities than the actors compute; nothing was trained on the batch."""


class NonFiniteError(RuntimeError):
    """Loss or gradient were not finite in several optimizer steps in a row."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Over the response tokens of one mini-batch on all ranks. Made by `gather`; the vector it gathers has this order.

    loss: weight x loss per token, summed. grad_norm_squared: over all shards, before clipping. logprob_diff:
    |actor - engine| in nats. clipped, dual_clipped: counts of tokens. approx_kl, entropy: nats, summed over tokens.
    """

    response_tokens: float
    logprob_diff: float
    clipped: float
    dual_clipped: float
    approx_kl: float
    entropy: float
    loss: float
    grad_norm_squared: float
    max_logprob_diff: float
    max_log_ratio: float

    @property
    def grad_norm(self) -> float:
        """L2 norm of the whole gradient."""
        return math.sqrt(self.grad_norm_squared)

    @property
    def finite(self) -> bool:
        """Whether the optimizer may use this gradient."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm_squared)


def gather(rows: Sequence[Tensor]) -> Totals:
    """Totals from this rank's rows (one per micro-batch, [number of fields] float64), by one collective."""
    own = _merge(torch.stack(list(rows)))
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return Totals(*_merge(torch.stack(everyone)).tolist())


def _merge(rows: Tensor) -> Tensor:
    return torch.cat([rows[:, :NUM_SUMS].sum(dim=0), rows[:, NUM_SUMS:].max(dim=0).values])


class Updater:
    """Holds what lives from update to update: the optimizer and the count of skipped steps in a row."""

    def __init__(
        self, policy: PackedPolicy, optimizer: torch.optim.Optimizer, cfg: Config, device: torch.device
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._cfg = cfg
        self._device = device
        self._skipped_in_a_row = 0

    def update(self, version: int, minibatches: Sequence[Sequence[Sequence[TrainSequence]]]) -> dict[str, float]:
        """This rank's [mini-batches][micro-batches][sequences] -> metrics, equal on all ranks.

        Raises WeightParityError before the first optimizer step if the batch was sampled from other weights, and
        NonFiniteError after three skipped steps in a row.
        """
        lr = self._set_learning_rate(version)
        batches = [[collate(sequences, self._device) for sequences in minibatch] for minibatch in minibatches]
        on_policy = len(batches) == 1
        if not on_policy:
            old_logprobs, parity = self._old_logprobs(batches)
            self._check_parity(parity)
        steps: list[Totals] = []
        for k, minibatch in enumerate(batches):
            totals = self._forward_backward(minibatch, None if on_policy else old_logprobs[k])
            if on_policy:
                parity = totals
                self._check_parity(parity)
            if self._step(totals):
                steps.append(totals)
        return _metrics(steps, parity, lr=lr, skipped=len(batches) - len(steps))

    def _set_learning_rate(self, version: int) -> float:
        """Step k = version + 1 of a warm-up of N runs at lr k / N: the first update moves the weights."""
        optim = self._cfg.actor.optim
        lr = optim.lr * min(1.0, (version + 1) / max(1, optim.lr_warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    @torch.no_grad()
    def _old_logprobs(self, batches: Sequence[Sequence[MicroBatch]]) -> tuple[list[list[Tensor]], Totals]:
        """[mini-batch][micro-batch] of [R] before the first of several optimizer steps, and the totals with parity."""
        old_logprobs = [[self._run(batch)[0] for batch in minibatch] for minibatch in batches]
        rows = []
        for minibatch, logprobs in zip(batches, old_logprobs, strict=True):
            for batch, own in zip(minibatch, logprobs, strict=True):
                zeros = torch.zeros_like(own)
                stats = dict.fromkeys(("clipped", "dual_clipped", "approx_kl"), zeros)
                rows.append(_row(batch, own, zeros, stats, 0.0))
        return old_logprobs, gather(rows)

    def _run(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return self._policy(batch.token_ids, batch.position_ids, batch.segments, batch.predictors, batch.labels)

    def _forward_backward(self, minibatch: Sequence[MicroBatch], old_logprobs: Sequence[Tensor] | None) -> Totals:
        """Leaves the gradient of one mini-batch in the shards. Without old log-probabilities the policy is its own."""
        algorithm = self._cfg.algorithm
        rows = []
        for k, batch in enumerate(minibatch):
            self._sync_gradients(last=k == len(minibatch) - 1)
            logprobs, entropy = self._run(batch)
            per_token, stats = policy_loss(
                logprobs,
                logprobs.detach() if old_logprobs is None else old_logprobs[k],
                batch.advantages,
                clip_ratio_low=algorithm.clip_ratio_low,
                clip_ratio_high=algorithm.clip_ratio_high,
                clip_ratio_c=algorithm.clip_ratio_c,
            )
            loss = (batch.weights * per_token).sum()
            # FSDP averages gradients over ranks, but the weights already divide by the whole mini-batch: undo the mean.
            (loss * dist.get_world_size()).backward()
            rows.append(_row(batch, logprobs.detach(), entropy, stats, loss.detach()))
        grads = [p.grad.to_local() for p in self._policy.parameters() if isinstance(p.grad, DTensor)]
        rows[-1][NUM_SUMS - 1] = torch.nn.utils.get_total_norm(grads).double().square()
        return gather(rows)

    def _sync_gradients(self, *, last: bool) -> None:
        """Where parameters stay gathered (`reshard_after_forward` off: memory to spare), so do gradients until the last
        micro-batch: one reduction per optimizer step. Otherwise each micro-batch reduces into the shards."""
        if not self._cfg.actor.reshard_after_forward:
            assert isinstance(self._policy, FSDPModule)
            self._policy.set_requires_gradient_sync(last)
            self._policy.set_reshard_after_backward(last)

    def _check_parity(self, totals: Totals) -> None:
        mean = totals.logprob_diff / max(1.0, totals.response_tokens)
        bound = self._cfg.weight_sync.max_mean_logprob_diff
        if not mean <= bound:
            raise WeightParityError(
                f"the mean of |log-probability of the actors - of the engines| is {mean:.4g} over "
                f"{totals.response_tokens:.0f} tokens (largest {totals.max_logprob_diff:.4g}), above "
                f"`weight_sync.max_mean_logprob_diff` ({bound:g}); nothing was trained on this batch. Suspect the "
                "weight sync (engines on old weights), different compute types (`model.dtype`, `rollout.vllm`), or "
                "sampling settings that change probabilities (`rollout.top_p`, `rollout.top_k`)"
            )

    def _step(self, totals: Totals) -> bool:
        """Clip and step; or, where loss or gradient are not finite, drop the gradient and return False."""
        if totals.finite:
            self._skipped_in_a_row = 0
            max_norm = self._cfg.actor.optim.grad_clip
            if totals.grad_norm > max_norm:
                torch.nn.utils.clip_grads_with_norm_(
                    self._policy.parameters(), max_norm, torch.tensor(totals.grad_norm, device=self._device)
                )
            self._optimizer.step()
        else:
            self._skipped_in_a_row += 1
        self._optimizer.zero_grad()
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"loss ({totals.loss}) or gradient norm ({totals.grad_norm}) were not finite in "
                f"{self._skipped_in_a_row} optimizer steps in a row; all were skipped. Lower `actor.optim.lr`, or go "
                "back to an earlier checkpoint"
            )
        return totals.finite


def _row(
    batch: MicroBatch, logprobs: Tensor, entropy: Tensor, stats: dict[str, Tensor], loss: Tensor | float
) -> Tensor:
    """The fields of `Totals` for one micro-batch, float64; the gradient norm is filled in later."""
    diff = (logprobs - batch.rollout_logprobs).abs()
    sums = [diff, stats["clipped"], stats["dual_clipped"], stats["approx_kl"], entropy]
    row = torch.zeros(NUM_SUMS + 2, dtype=torch.float64, device=logprobs.device)
    row[0] = len(logprobs)
    row[1:6] = torch.stack([x.double().sum() for x in sums])
    row[6] = loss
    if len(logprobs) > 0:
        row[NUM_SUMS:] = torch.stack([diff.max(), -stats["approx_kl"].min()])
    return row


def _metrics(steps: Sequence[Totals], parity: Totals, *, lr: float, skipped: int) -> dict[str, float]:
    """Means over optimizer steps that were taken (loss, gradient norm) and over their response tokens (the rest)."""
    tokens = max(1.0, sum(t.response_tokens for t in steps))
    count = max(1, len(steps))
    return {
        "actor/loss": sum(t.loss for t in steps) / count,
        "actor/grad_norm": sum(t.grad_norm for t in steps) / count,
        "actor/lr": lr,
        "actor/clip_fraction": sum(t.clipped for t in steps) / tokens,
        "actor/dual_clip_fraction": sum(t.dual_clipped for t in steps) / tokens,
        "actor/approx_kl": sum(t.approx_kl for t in steps) / tokens,
        "actor/entropy": sum(t.entropy for t in steps) / tokens,
        "actor/ratio_max": math.exp(max((t.max_log_ratio for t in steps), default=math.nan)),
        "actor/response_tokens": parity.response_tokens,
        "actor/skipped_steps": float(skipped),
        "parity/mean_abs_logprob_diff": parity.logprob_diff / max(1.0, parity.response_tokens),
        "parity/max_abs_logprob_diff": parity.max_logprob_diff,
    }
