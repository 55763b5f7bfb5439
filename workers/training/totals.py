"""Sums the statistics of one optimizer step over all ranks: tokens of micro-batches in, totals and metrics out.

Everything is summed over tokens and divided once at the end, so that metrics, like the gradient, hardly depend on
micro-batches and ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dapo.objective import Correction, Objective

# One row of a micro-batch: these sums, then `_MISMATCH_SUMS` per staleness, then the maxima.
_SUMS = (
    "trained_tokens",
    "loss",
    "grad_norm_squared",
    "clipped_low",
    "clipped_high",
    "dual_clipped",
    "log_ratio",
    "ratio",
    "kl",
    "entropy",
)
_MISMATCH_SUMS = ("tokens", "difference", "ratio", "ratio_squared", "affected", "non_finite")
STALENESS_BUCKETS = 5  # tokens of policies 0, 1, 2, 3 updates old; the last also holds older ones
_NUM_SUMS = len(_SUMS) + STALENESS_BUCKETS * len(_MISMATCH_SUMS)
_NUM_MAXIMA = 1 + STALENESS_BUCKETS
GRAD_NORM_SQUARED = _SUMS.index("grad_norm_squared")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Mismatch of actors and engines over the tokens of one staleness. The sums are over finite tokens only."""

    tokens: float
    difference: float  # sum of |old - rollout log-probability|, nats
    ratio: float  # sum of the importance ratio before truncation or masking
    ratio_squared: float
    affected: float  # tokens truncated or masked
    non_finite: float  # tokens whose difference or ratio is not finite
    max_difference: float

    @property
    def finite(self) -> float:
        """Number of tokens in the sums."""
        return self.tokens - self.non_finite

    @property
    def mean(self) -> float:
        """Mean of |old - rollout log-probability|; 0 without tokens."""
        return self.difference / max(1.0, self.finite)

    @property
    def ess(self) -> float:
        """Effective sample size as a share, (sum of ratios)^2 / (tokens x sum of squares), or NaN."""
        return math.nan if self.finite == 0 else self.ratio**2 / max(self.finite * self.ratio_squared, 1e-300)

    def metrics(self, prefix: str) -> dict[str, float]:
        return {
            f"{prefix}/mean_abs_logprob_diff": self.mean,
            f"{prefix}/max_abs_logprob_diff": self.max_difference,
            f"{prefix}/ess": self.ess,
            f"{prefix}/corrected_share": self.affected / max(1.0, self.tokens),
        }


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of one optimizer step over all ranks. Made by `gather`."""

    # Over the trained tokens: counts, nats, and the ratio itself. "loss" is weighted already; "grad_norm_squared" is
    # over all shards, before clipping.
    sums: dict[str, float]
    mismatch: tuple[Mismatch, ...]  # per staleness, over all tokens
    max_log_ratio: float

    @property
    def trained_tokens(self) -> float:
        """Number of response tokens in the loss."""
        return self.sums["trained_tokens"]

    @property
    def grad_norm(self) -> float:
        """L2 norm of the whole gradient."""
        return math.sqrt(self.sums["grad_norm_squared"])

    @property
    def finite(self) -> bool:
        """Whether the optimizer may use this gradient: loss, gradient and all log-probabilities are finite."""
        return self.finite_loss and math.isfinite(self.sums["grad_norm_squared"])

    @property
    def finite_loss(self) -> bool:
        """Whether loss and all log-probabilities are finite; the gradient may not be."""
        return math.isfinite(self.sums["loss"]) and not self.all_mismatch.non_finite

    @property
    def all_mismatch(self) -> Mismatch:
        return Mismatch(
            **{name: sum(getattr(m, name) for m in self.mismatch) for name in _MISMATCH_SUMS},
            max_difference=max(m.max_difference for m in self.mismatch),
        )


def neutral_row(device: torch.device) -> Tensor:
    """Returns a row that changes no total, for a micro-batch that another rank counts."""
    maxima = torch.full((_NUM_MAXIMA,), -torch.inf, dtype=torch.float64, device=device)
    return torch.cat([torch.zeros(_NUM_SUMS, dtype=torch.float64, device=device), maxima])


def row_of(correction: Correction, staleness: Tensor, result: Objective | None) -> Tensor:
    """Returns one micro-batch as a float64 row; the gradient norm is filled in later. Without `result` it has only the
    mismatch."""
    device = staleness.device
    sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
    maxima = torch.full((_NUM_MAXIMA,), -torch.inf, dtype=torch.float64, device=device)
    if result is not None:
        sums[0], sums[1] = result.trained.sum(), result.loss.detach()
        per_token = [result.clipped_low, result.clipped_high, result.dual_clipped, result.log_ratio]
        per_token += [result.log_ratio.exp() * result.trained, result.kl, result.entropy]
        sums[3:] = torch.stack([values.double().sum() for values in per_token])
        if result.trained.numel():  # testing the values would wait for the device
            maxima[0] = result.log_ratio.where(result.trained, -torch.inf).max()
    bucket = staleness.clamp(0, STALENESS_BUCKETS - 1)
    difference, ratio = correction.difference.double().abs(), correction.ratio.double()
    finite = difference.isfinite() & ratio.isfinite()
    difference, ratio = difference.where(finite, 0.0), ratio.where(finite, 0.0)
    affected = correction.affected & finite
    per_token = [torch.ones_like(ratio), difference, ratio, ratio.square(), affected.double(), (~finite).double()]
    columns = torch.stack(per_token, 1)
    mismatch = torch.zeros(STALENESS_BUCKETS, columns.shape[1], dtype=torch.float64, device=device)
    mismatch.index_add_(0, bucket, columns)
    maxima[1:].scatter_reduce_(0, bucket, difference, "amax")
    return torch.cat([sums, mismatch.flatten(), maxima])


def gather(rows: Sequence[Tensor]) -> Totals:
    """Merges the rows (one per micro-batch) of all ranks by one collective; equal on all."""
    own = _merge(torch.stack(list(rows)))
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    merged = _merge(torch.stack(everyone)).tolist()
    sums, maxima = merged[:_NUM_SUMS], merged[_NUM_SUMS:]
    width = len(_MISMATCH_SUMS)
    starts = range(len(_SUMS), _NUM_SUMS, width)
    mismatch = [
        Mismatch(
            **dict(zip(_MISMATCH_SUMS, sums[start : start + width], strict=True)),
            max_difference=worst if sums[start] else 0.0,
        )
        for start, worst in zip(starts, maxima[1:], strict=True)
    ]
    return Totals(dict(zip(_SUMS, sums, strict=False)), tuple(mismatch), maxima[0])


def _merge(rows: Tensor) -> Tensor:
    return torch.cat([rows[:, :_NUM_SUMS].sum(dim=0), rows[:, _NUM_SUMS:].max(dim=0).values])


def metrics_of(steps: Sequence[Totals], parity: Totals, *, lr: float, skipped: int, empty: int) -> dict[str, float]:
    """Returns means over the optimizer steps taken (loss, gradient norm) and over their trained tokens (the rest). lr:
    of the last optimizer step. skipped, empty: optimizer steps not taken, because of numbers that are not finite or
    because there was no token to train. parity: totals of the batch before the first step."""
    count, tokens = max(1, len(steps)), max(1.0, sum(t.trained_tokens for t in steps))
    mean = {name: sum(t.sums[name] for t in steps) / tokens for name in _SUMS}
    whole = parity.all_mismatch
    metrics = {
        "actor/loss": sum(t.sums["loss"] for t in steps) / count,
        "actor/grad_norm": sum(t.grad_norm for t in steps) / count,
        "actor/lr": lr,
        "actor/clip_fraction": mean["clipped_low"] + mean["clipped_high"],
        "actor/clip_fraction_low": mean["clipped_low"],
        "actor/clip_fraction_high": mean["clipped_high"],
        "actor/dual_clip_fraction": mean["dual_clipped"],
        "actor/approx_kl": -mean["log_ratio"],
        "actor/ratio_mean": mean["ratio"],
        "actor/ratio_max": math.exp(max((t.max_log_ratio for t in steps), default=math.nan)),
        "actor/ref_kl": mean["kl"],
        "actor/entropy": mean["entropy"],
        "actor/optimizer_steps": float(len(steps)),
        "actor/skipped_steps": float(skipped),
        "actor/empty_steps": float(empty),
        "parity/non_finite_tokens": whole.non_finite,
        **whole.metrics("parity"),
    }
    if any(m.tokens for m in parity.mismatch[1:]):
        for staleness, mismatch in enumerate(parity.mismatch):
            if mismatch.tokens:
                metrics |= mismatch.metrics(f"parity/staleness_{staleness}")
    return metrics
