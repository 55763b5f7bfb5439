"""Runs one update of the policy on one FSDP rank: mini-batches of packed sequences in, metrics over all ranks out.

Each pass over a mini-batch is one optimizer step on the objective (`dapo.algorithm.objective`). All ranks decide alike,
because every decision uses totals that all of them have gathered.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dapo.algorithm.mismatch import Variant
from dapo.algorithm.objective import Constants, Correction, objective, off_policy_mask, rollout_correction
from dapo.algorithm.own.loading import OwnFunction
from dapo.algorithm.schedule import learning_rates
from dapo.config.algorithm import BY_COVARIANCE
from dapo.config.derived import shares_prompts
from dapo.config.schema import Config
from dapo.ground.fault_points import fault_point
from dapo.pools import Updated
from dapo.types import TrainSequence
from dapo.workers.training.collective_errors import Refused, Unanimous
from dapo.workers.training.forward.policy import MicroBatch, PackedPolicy, collate
from dapo.workers.training.forward.ulysses import gather_rows
from dapo.workers.training.fsdp import reshard
from dapo.workers.training.mesh import Mesh
from dapo.workers.training.optimizer import LossScale
from dapo.workers.training.update_metrics import (
    GRAD_NORM_SQUARED,
    Totals,
    check_parity,
    gather,
    metrics_of,
    neutral_row,
    row_of,
)


@torch.no_grad()
def highest(values: Sequence[Tensor], weights: Sequence[Tensor], share: float, mesh: Mesh) -> list[Tensor]:
    """Returns a mask [R] per micro-batch: 1 for the `share` of the trained tokens with the highest value, else 0. The
    number of tokens is rounded up and ties are included; a token with value -inf never is. values, weights: [R] per
    micro-batch of this rank; tokens of weight 0 are not trained and not counted. A collective over all ranks."""
    own = torch.cat([value[weight != 0] for value, weight in zip(values, weights, strict=True)])
    everyone = _gather(own if mesh.sequence_parallel.rank == 0 else own[:0])  # ranks of one sequence have equal values
    bound = torch.full((), -math.inf, dtype=own.dtype, device=own.device)
    if len(everyone):
        count = max(1, math.ceil(share * len(everyone)))
        bound = everyone.kthvalue(len(everyone) - count + 1).values
    return [((value >= bound) & (value > -math.inf)).to(torch.float32) for value in values]


@torch.no_grad()
def covariances(logprobs: Sequence[Tensor], minibatch: Sequence[MicroBatch]) -> list[Tensor]:
    """Returns (logp - mean) (A - mean) per token (arXiv 2505.22617), float64 [R] per micro-batch, with means
    over the trained tokens of all ranks. A collective over all ranks."""
    sums = torch.zeros(3, dtype=torch.float64, device=minibatch[0].weights.device)
    for own, batch in zip(logprobs, minibatch, strict=True):
        trained = batch.weights != 0
        columns = torch.stack([torch.ones_like(own), own, batch.advantages])
        sums += columns.double().where(trained, 0.0).sum(dim=1)
    dist.all_reduce(sums)  # a sequence counts once for each of its ranks, in all three sums alike
    _, logprob, advantage = sums / sums[0].clamp(min=1.0)
    return [
        (own.double() - logprob) * (batch.advantages.double() - advantage)
        for own, batch in zip(logprobs, minibatch, strict=True)
    ]


def dice(sequences: Sequence[TrainSequence], version: int) -> Tensor:
    """Returns a pseudo-random number in [0, 1) for each sampled token, float64 [R]. It depends on the version and on
    the sequence, wherever that is packed."""
    found = [np.zeros(0)]
    for sequence in sequences:
        digest = hashlib.blake2b(sequence.token_ids.tobytes(), digest_size=8).digest()
        seed = [version, int.from_bytes(digest, "little")]
        found.append(np.random.default_rng(seed).random(len(sequence.rollout_logprobs)))
    return torch.from_numpy(np.concatenate(found))


def _gather(values: Tensor) -> Tensor:
    """Concatenates the values of all ranks, whose numbers of values may differ."""
    size = torch.tensor([len(values)], device=values.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    assert dist.group.WORLD is not None
    return gather_rows(values, tuple(map(int, sizes)), dist.group.WORLD)


MAX_SKIPPED_IN_A_ROW = 3


class NonFiniteError(Unanimous):
    """Too many optimizer steps in a row were skipped for non-finite numbers, and the update took none before."""


class Updater:
    """State that lives across updates: optimizer, loss scale and the number of skipped steps in a row."""

    def __init__(
        self,
        policy: PackedPolicy,
        reference: nn.Module | None,
        optimizer: torch.optim.Optimizer,
        cfg: Config,
        mesh: Mesh,
        own_loss: OwnFunction | None = None,
    ) -> None:
        """reference: called like the policy, frozen; only if `algorithm.kl` needs one. own_loss: if
        `algorithm.policy_loss` names one."""
        self._policy = policy
        self._reference = reference
        self._optimizer = optimizer
        self._cfg = cfg
        self._mesh = mesh
        self._own_loss = own_loss
        self._device = torch.device(mesh.device)
        self._learning_rate = learning_rates(cfg)
        self.scale = LossScale(cfg.model.dtype, "cpu" if cfg.actor.offload == "host" else mesh.device)
        self._skipped_in_a_row = 0

    def update(
        self, version: int, minibatches: Sequence[Sequence[Sequence[TrainSequence]]], order: Sequence[int]
    ) -> Updated:
        """Trains on this rank's [mini-batches][micro-batches][sequences], taken in `order`; returns the same on all
        ranks. Stops after three skipped steps in a row. Raises `Unanimous`, with nothing changed: WeightParityError if
        the batch was sampled from other weights, NonFiniteError if no step was taken before the three."""
        try:
            return self._update(version, minibatches, order)
        except Unanimous:
            self._optimizer.zero_grad()  # otherwise the next batch would add to the gradient of a refused one
            self.scale.forget()
            raise

    def _update(
        self, version: int, minibatches: Sequence[Sequence[Sequence[TrainSequence]]], order: Sequence[int]
    ) -> Updated:
        batches = [[self._collate(sequences) for sequences in minibatch] for minibatch in minibatches]
        parity: Totals | None = None
        old: dict[int, list[Tensor]] = {}  # log-probabilities before the update, by mini-batch
        kept: list[list[Tensor]] | None = None
        chosen: list[list[Tensor]] | None = None
        of_engines = self._cfg.algorithm.rollout_correction.use_rollout_logprobs
        several = len(order) > 1 and not of_engines
        share = self._cfg.algorithm.entropy_top_share
        by_covariance = self._cfg.algorithm.policy_loss in BY_COVARIANCE
        before = [[batch.rollout_logprobs for batch in minibatch] for minibatch in batches]
        if share < 1 or (by_covariance and not of_engines):
            own, entropies = self._before(batches)
            before = before if of_engines else own
            old = dict(enumerate(own)) if several else {}
            if share < 1:
                kept = [
                    highest(entropy, [batch.weights for batch in minibatch], share, self._mesh)
                    for entropy, minibatch in zip(entropies, batches, strict=True)
                ]
        elif several:  # all but those of the first optimizer step, which computes them as it goes
            later = [k for k in range(len(batches)) if k != order[0]]
            old = dict(zip(later, self._before([batches[k] for k in later])[0], strict=True))
        compared = self._parity(batches, old) if old else None
        if by_covariance:
            chosen = [
                self._by_covariance(version, *of_minibatch)
                for of_minibatch in zip(minibatches, batches, before, strict=True)
            ]
        reference = self._reference_of(batches) if self._cfg.algorithm.kl.loss_coeff else None
        steps: list[Totals] = []
        response_tokens: dict[int, float] = {}  # by mini-batch: a second epoch sees the same ones
        skipped: list[int] = []
        empty, overflowed, stop = 0, 0, ""
        for step, k in enumerate(order):
            lr = self._learning_rate(version, step)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            totals, logprobs = self._forward_backward(
                batches[k],
                old.get(k),
                None if reference is None else reference[k],
                None if kept is None else kept[k],
                None if chosen is None else chosen[k],
            )
            if parity is None:
                parity = totals if compared is None else compared if k in old else compared.with_more(totals)
                check_parity(parity, self._cfg)
            if several:
                old.setdefault(k, logprobs)
            response_tokens[k] = totals.all_mismatch.tokens
            overflow = self.scale.update() and totals.finite_loss  # then a smaller scale may help
            if self._step(totals, overflow=overflow):
                steps.append(totals)
            elif overflow:
                overflowed += 1
            elif totals.finite:
                empty += 1
            else:
                skipped.append(k)
            if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                stop = self._why_to_stop(totals)
                break
        assert parity is not None, "an update without mini-batches"
        if stop and not steps:
            raise NonFiniteError(stop)
        metrics = metrics_of(steps, parity, lr=lr, skipped=len(skipped), empty=empty)
        metrics |= {"actor/response_tokens": sum(response_tokens.values())}
        if self.scale.enabled:
            metrics |= {"actor/loss_scale": self.scale.value, "actor/overflowed_steps": float(overflowed)}
        return Updated(metrics=metrics, skipped=tuple(dict.fromkeys(skipped)), stop=stop)

    def warm_up(self) -> None:
        """Compiles what `actor.compile` asks for, by passes over two short sequences that change nothing."""
        response = np.zeros(6, np.float32)
        one = TrainSequence(
            token_ids=np.zeros(8, np.int32),
            num_prompt_tokens=2,
            rollout_logprobs=response,
            advantage=0.0,
            token_weight=0.0,
            staleness=response.astype(np.int32),
        )
        batch = self._collate([one, one])
        with torch.no_grad():
            self._policy(batch)
        self._policy(batch)[0].sum().backward()
        self._optimizer.zero_grad()
        reshard(self._policy)

    def reference_logprobs(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> list[list[Tensor]]:
        """Returns the reference policy's log-probabilities, [micro-batches][sequences] of [R], on the CPU."""
        [logprobs] = self._reference_of([[self._collate(sequences) for sequences in micro_batches]])
        return _by_sequence(logprobs, micro_batches)

    @torch.no_grad()
    def policy_logprobs(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> list[list[Tensor]]:
        """Returns the policy's log-probabilities, [micro-batches][sequences] of [R], on the CPU."""
        logprobs = [self._policy(self._collate(sequences))[0] for sequences in micro_batches]
        reshard(self._policy)
        return _by_sequence(logprobs, micro_batches)

    @torch.no_grad()
    def probe(self, micro_batches: Sequence[Sequence[TrainSequence]], variant: Variant) -> list[list[Tensor]]:
        """Returns `PackedPolicy.probe`, [micro-batches][sequences] of [R, 1 + K], on the CPU."""
        found = [self._policy.probe(self._collate(sequences), variant) for sequences in micro_batches]
        reshard(self._policy)
        return _by_sequence(found, micro_batches)

    def _collate(self, sequences: Sequence[TrainSequence]) -> MicroBatch:
        shared = shares_prompts(self._cfg)
        return collate(sequences, self._device, self._mesh.sequence_parallel, share_prompts=shared)

    @torch.no_grad()
    def _before(self, batches: Sequence[Sequence[MicroBatch]]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Returns log-probabilities and entropies before the update, each [mini-batch][micro-batch] of [R]."""
        found = [[self._policy(batch) for batch in minibatch] for minibatch in batches]
        logprobs, entropies = ([[one[part] for one in minibatch] for minibatch in found] for part in (0, 1))
        return logprobs, entropies

    def _parity(self, batches: Sequence[Sequence[MicroBatch]], old: Mapping[int, Sequence[Tensor]]) -> Totals:
        cfg = self._cfg.algorithm.rollout_correction
        rows = [
            row_of(rollout_correction(own, batch.rollout_logprobs, batch.segment_ids, cfg), batch.staleness, None)
            for k, logprobs in old.items()
            for batch, own in zip(batches[k], logprobs, strict=True)
        ]
        return self._gather(rows)

    def _by_covariance(
        self,
        version: int,
        sequences: Sequence[Sequence[TrainSequence]],
        minibatch: Sequence[MicroBatch],
        logprobs: Sequence[Tensor],
    ) -> list[Tensor]:
        """Returns a mask [R] per micro-batch of the tokens that `clip_cov` leaves out, or that `kl_cov` holds.
        sequences: those of each micro-batch. logprobs: of before the update."""
        cfg = self._cfg.algorithm
        found, share = covariances(logprobs, minibatch), cfg.kl_cov.share
        values = [value.where(value > 0, -math.inf) for value in found]  # all are 0 if all advantages are equal
        if cfg.policy_loss == "clip_cov":
            share, lower, upper = cfg.clip_cov.share, cfg.clip_cov.lower, cfg.clip_cov.upper
            values = [
                dice(own, version).to(value).where((value > lower) & (value < upper), -math.inf)
                for own, value in zip(sequences, found, strict=True)
            ]
        return highest(values, [batch.weights for batch in minibatch], share, self._mesh)

    @torch.no_grad()
    def _reference_of(self, batches: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor]]:
        """Returns [mini-batch][micro-batch] of [R]. The reference chooses its experts itself: the engine's choice is
        that of another policy, with which it would be a model that nobody has trained."""
        if self._reference is None:
            raise Refused("there is no reference policy, because no coefficient of `algorithm.kl` is set")
        logprobs = [[self._reference(replace(batch, experts=None))[0] for batch in minibatch] for minibatch in batches]
        reshard(self._reference)
        return logprobs

    def _forward_backward(
        self,
        minibatch: Sequence[MicroBatch],
        old: Sequence[Tensor] | None,
        reference: Sequence[Tensor] | None,
        kept: Sequence[Tensor] | None = None,
        chosen: Sequence[Tensor] | None = None,
    ) -> tuple[Totals, list[Tensor]]:
        """Leaves the gradient of one mini-batch in the shards; returns its log-probabilities too. old, reference:
        log-probabilities per micro-batch. kept: mask of the tokens that carry the policy loss (`entropy_top_share`).
        chosen: mask of those that the loss has chosen (`_by_covariance`)."""
        rows, own = [], []
        for k, batch in enumerate(minibatch):
            self._sync_gradients(last=k == len(minibatch) - 1)
            logprobs, entropy, of_support = self._policy(batch)
            own.append(logprobs.detach())
            proximal = own[k] if old is None else old[k]
            constants, correction = self._constants(batch, proximal, None if reference is None else reference[k])
            if kept is not None:
                constants = replace(constants, correction=constants.correction * kept[k])
            if chosen is not None and self._cfg.algorithm.policy_loss == "clip_cov":
                constants = replace(constants, correction=constants.correction * (1.0 - chosen[k]))
            elif chosen is not None:
                constants = replace(constants, chosen=chosen[k])
            if threshold := self._cfg.algorithm.rollout_correction.off_policy_mask_threshold:
                mask = off_policy_mask(logprobs, batch.rollout_logprobs, batch.advantages, batch.segment_ids, threshold)
                constants = replace(constants, correction=constants.correction * mask)
            result = objective(logprobs, entropy, constants, self._cfg.algorithm, self._own_loss, of_support)
            # FSDP averages gradients over ranks, but the weights already divide by the whole mini-batch: undo the mean.
            # Sequence-parallel ranks have the same loss, and each has the gradient through its own tokens.
            broken = math.nan if fault_point("actor.loss") == "nan" else 1.0
            self.scale.scaled(result.loss * self._mesh.world_size * broken).backward()
            rows.append(row_of(correction, batch.staleness, result))
        grads = [p.grad.to_local() for p in self._policy.parameters() if isinstance(p.grad, DTensor)]
        if fault_point("actor.gradient") == "nan":
            grads[0].fill_(math.nan)
        self.scale.unscale(self._optimizer)
        return self._gather(rows, torch.nn.utils.get_total_norm(grads).double().square()), own

    def _gather(self, rows: Sequence[Tensor], grad_norm_squared: Tensor | None = None) -> Totals:
        """Sums over all ranks; each micro-batch and each shard of the gradient counts once, also with copies."""
        counted = list(rows) if self._mesh.sequence_parallel.rank == 0 else [neutral_row(self._device)]
        if grad_norm_squared is not None:
            counted[-1][GRAD_NORM_SQUARED] = grad_norm_squared / self._mesh.num_copies
        return gather(counted)

    def _constants(self, batch: MicroBatch, proximal: Tensor, reference: Tensor | None) -> tuple[Constants, Correction]:
        """Returns the constants of the objective. proximal: the actors' log-probabilities [R] before the update (in its
        only or first step: the policy's)."""
        cfg = self._cfg.algorithm.rollout_correction
        correction = rollout_correction(proximal, batch.rollout_logprobs, batch.segment_ids, cfg)
        constants = Constants(
            old_logprobs=batch.rollout_logprobs if cfg.use_rollout_logprobs else proximal,
            ref_logprobs=reference,
            correction=correction.weights,
            advantages=batch.advantages,
            weights=batch.weights,
            segment_ids=batch.segment_ids,
            support_logprobs=batch.support_logprobs,
        )
        return constants, correction

    def _sync_gradients(self, *, last: bool) -> None:
        """Sets when gradients are reduced, before the backward pass of a micro-batch.

        If parameters stay gathered (`reshard_after_forward` off: memory to spare), so do gradients until the last
        micro-batch: one reduction per optimizer step. Otherwise each micro-batch reduces into the shards; copies of the
        parameters (HSDP) are summed in the last one, unless offloaded, because the sums would stay on the GPU until
        then.
        """
        assert isinstance(self._policy, FSDPModule)
        if not self._cfg.actor.reshard_after_forward:
            self._policy.set_requires_gradient_sync(last)
            self._policy.set_reshard_after_backward(last)
        elif self._mesh.num_copies > 1 and self._cfg.actor.offload != "host":
            self._policy.set_requires_all_reduce(last)

    def _step(self, totals: Totals, *, overflow: bool) -> bool:
        """Clips and steps; if some number is not finite, drops the gradient. Returns whether it stepped. Without a
        token to train there is no gradient, and the optimizer's momentum must not act alone. overflow: only the scaled
        gradient is not finite, which does not count as a skipped step."""
        if totals.finite and totals.trained_tokens > 0:
            self._skipped_in_a_row = 0
            max_norm = self._cfg.actor.optim.grad_clip
            if totals.grad_norm > max_norm:
                torch.nn.utils.clip_grads_with_norm_(
                    self._policy.parameters(), max_norm, torch.tensor(totals.grad_norm, device=self._device)
                )
            fault_point("actor.step")
            self._optimizer.step()
        elif not totals.finite and not overflow:
            self._skipped_in_a_row += 1
        self._optimizer.zero_grad()
        return totals.finite and totals.trained_tokens > 0

    def _why_to_stop(self, last: Totals) -> str:
        return (
            f"{self._skipped_in_a_row} optimizer steps in a row were skipped, because numbers were not finite: in the "
            f"last one loss {last.sums['loss']}, gradient norm {last.grad_norm}, log-probabilities of "
            f"{last.all_mismatch.non_finite:.0f} tokens. Lower `actor.optim.lr`, or go back to an earlier checkpoint"
        )


def _by_sequence(logprobs: Sequence[Tensor], micro_batches: Sequence[Sequence[TrainSequence]]) -> list[list[Tensor]]:
    return [
        [part.cpu() for part in values.split([len(s.rollout_logprobs) for s in sequences])]
        for values, sequences in zip(logprobs, micro_batches, strict=True)
    ]
