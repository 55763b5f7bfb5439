"""Metrics of an update: statistics of optimizer steps, summed over ranks; agreement of actors and engines; memory and
model FLOPs utilisation.

Everything is summed over tokens and divided once at the end, so that metrics, like the gradient, hardly depend on
micro-batches and ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from dapo.algorithm.objective import Correction, Objective
from dapo.config.devices import peak_flops
from dapo.config.facts.model_shape import ModelShape
from dapo.config.schema import Config
from dapo.ground.usage import RankUse, resident_bytes
from dapo.types import TrainBatch
from dapo.workers.training.collective_errors import Unanimous

# Metrics that are means over the trained tokens: the values of each token, 0 where it is not trained. A new one is one
# more line here.
_TOKEN_MEANS: dict[str, Callable[[Objective], Tensor]] = {
    "actor/clip_fraction_low": lambda result: result.clipped_low,
    "actor/clip_fraction_high": lambda result: result.clipped_high,
    "actor/dual_clip_fraction": lambda result: result.dual_clipped,
    "actor/left_out_fraction": lambda result: result.left_out,
    "actor/ratio_mean": lambda result: result.log_ratio.exp() * result.trained,
    "actor/ref_kl": lambda result: result.kl,
    "actor/entropy": lambda result: result.entropy,
}
_TOKEN_SUMS: dict[str, Callable[[Objective], Tensor]] = {
    "trained_tokens": lambda result: result.trained,
    "loss": lambda result: result.loss.detach(),  # weighted already
    "log_ratio": lambda result: result.log_ratio,
    **_TOKEN_MEANS,
}
_SUMS = ("grad_norm_squared", *_TOKEN_SUMS)
_MISMATCH_SUMS = ("tokens", "difference", "ratio", "ratio_squared", "affected", "non_finite")
STALENESS_BUCKETS = 5  # tokens of policies 0, 1, 2, 3 updates old; the last also holds older ones
# One row of a micro-batch: `_SUMS`, then `_MISMATCH_SUMS` per staleness, then the maxima.
_NUM_SUMS = len(_SUMS) + STALENESS_BUCKETS * len(_MISMATCH_SUMS)
_NUM_MAXIMA = 1 + STALENESS_BUCKETS
GRAD_NORM_SQUARED = _SUMS.index("grad_norm_squared")
_TYPE_ARGS = ("dtype", "quantization", "kv_cache_dtype")  # vLLM's, by which it may compute in other dtypes than actors


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


def together(parts: Sequence[Mismatch]) -> Mismatch:
    sums = {name: sum(getattr(part, name) for part in parts) for name in _MISMATCH_SUMS}
    return Mismatch(**sums, max_difference=max(part.max_difference for part in parts))


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of one optimizer step over all ranks. Made by `gather`."""

    sums: dict[str, float]  # `_SUMS`, in nats; "grad_norm_squared" is over all shards, before clipping
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
        return together(self.mismatch)

    def with_more(self, totals: "Totals") -> "Totals":
        """Returns `totals`, with the mismatch of both."""
        return replace(totals, mismatch=tuple(map(together, zip(self.mismatch, totals.mismatch, strict=True))))


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
        sums[1:] = torch.stack([values(result).double().sum() for values in _TOKEN_SUMS.values()])
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
    mean = {name: sum(t.sums[name] for t in steps) / tokens for name in ("log_ratio", *_TOKEN_MEANS)}
    whole = parity.all_mismatch
    metrics = {
        "actor/loss": sum(t.sums["loss"] for t in steps) / count,
        "actor/grad_norm": sum(t.grad_norm for t in steps) / count,
        "actor/lr": lr,
        **{name: mean[name] for name in _TOKEN_MEANS},
        "actor/clip_fraction": mean["actor/clip_fraction_low"] + mean["actor/clip_fraction_high"],
        "actor/approx_kl": -mean["log_ratio"],
        "actor/ratio_max": math.exp(max((t.max_log_ratio for t in steps), default=math.nan)),
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


class WeightParityError(Unanimous):
    """The engines sampled from other probabilities than the actors compute; nothing was trained on the batch."""


def check_parity(totals: Totals, cfg: Config) -> None:
    """Checks tokens of the current policy against one bound, tokens of older policies against another. Tokens with a
    log-probability that is not finite, on either side, are left out: their optimizer steps are skipped. Raises
    WeightParityError if the mean of |log-probability of the actors - of the engines| is above its bound."""
    fresh, older = totals.mismatch[0], totals.mismatch[1:]
    bound = cfg.weight_sync.max_mean_logprob_diff
    if not fresh.mean <= bound:
        raise WeightParityError(_message(fresh, "weight_sync.max_mean_logprob_diff", bound, _fresh_suspect(cfg)))
    bound = cfg.algorithm.rollout_correction.max_mean_stale_logprob_diff
    for staleness, mismatch in enumerate(older, start=1):
        if not mismatch.mean <= bound:
            suspect = (
                f"staleness: these tokens come from policies at least {staleness} updates old, while tokens of the "
                f"current policy agree (mean {fresh.mean:.4g} over {fresh.tokens:.0f}); sample from newer weights, "
                "lower `actor.optim.lr`, or raise the bound and correct (`algorithm.rollout_correction.mode`)"
            )
            key = "algorithm.rollout_correction.max_mean_stale_logprob_diff"
            raise WeightParityError(_message(mismatch, key, bound, suspect))


def _message(mismatch: Mismatch, key: str, bound: float, suspect: str) -> str:
    return (
        f"the mean of |log-probability of the actors - of the engines| is {mismatch.mean:.4g} over "
        f"{mismatch.tokens:.0f} tokens (largest {mismatch.max_difference:.4g}), above `{key}` ({bound:g}); nothing was "
        f"trained on this batch. Suspect {suspect}"
    )


def _fresh_suspect(cfg: Config) -> str:
    differing = {name: cfg.rollout.vllm[name] for name in _TYPE_ARGS if name in cfg.rollout.vllm}
    differing = {name: value for name, value in differing.items() if value not in (cfg.model.dtype, "auto", None)}
    if differing:
        given = ", ".join(f"`rollout.vllm.{name}` ({value})" for name, value in differing.items())
        return f"the compute types: {given} against `model.dtype` ({cfg.model.dtype}); then the weight sync"
    if cfg.model.dtype == "float32":
        return "the weight sync (engines on old weights): both sides compute in float32"
    return (
        f"the weight sync (engines on old weights); if the bound is passed by little, the rounding of "
        f"`model.dtype` ({cfg.model.dtype}), which the bound must leave room for"
    )


def begin_use(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def end_use(device: str) -> RankUse:
    """Returns the memory use of this process since `begin_use`."""
    resident = resident_bytes([psutil.Process()])
    if device != "cuda":
        return RankUse(resident_bytes=resident)
    peak = torch.cuda.max_memory_allocated()
    return RankUse(resident_bytes=resident, device=torch.cuda.get_device_name(), gpu_peak_bytes=peak)


def model_flops(batch: TrainBatch, shape: ModelShape, *, lora: bool) -> float:
    """Returns the FLOPs of all optimizer steps: for each 3 x the forward pass (`ModelShape.forward_flops`), because the
    backward pass counts twice; 2 x with LoRA, where the model's matrices get no gradient. Recomputation by
    checkpointing, and old or reference log-probabilities, do not count. A prompt counts for each of its responses, also
    where it is computed once for several."""
    forward = []
    for minibatch in batch.minibatches:
        tokens = sum(len(sequence.rollout_logprobs) for sequence in minibatch)
        lengths = [len(sequence.token_ids) for sequence in minibatch]
        forward.append(shape.forward_flops(lengths, head_tokens=tokens))
    return (2 if lora else 3) * sum(forward[k] for k in batch.order)


def rank_metrics(
    uses: Sequence[RankUse], batch: TrainBatch, seconds: float, shape: ModelShape | None, *, lora: bool
) -> dict[str, float]:
    """Returns the metrics `perf/rank/` of an update. MFU = model FLOPs / (seconds x GPUs x peak FLOP/s). uses: of all
    ranks. seconds: its duration. shape: None if unknown."""
    metrics = {"perf/rank/resident_bytes": float(max(use.resident_bytes for use in uses))}
    if uses[0].device:
        tokens = sum(len(sequence.token_ids) for minibatch in batch.minibatches for sequence in minibatch)
        metrics["perf/rank/gpu_peak_bytes"] = float(max(use.gpu_peak_bytes for use in uses))
        metrics["perf/rank/tokens_per_s_per_gpu"] = tokens / (seconds * len(uses))
    peaks = [peak_flops(use.device) for use in uses]
    if shape is not None and None not in peaks:
        peak = sum(each for each in peaks if each is not None)
        metrics["perf/rank/mfu"] = model_flops(batch, shape, lora=lora) / (seconds * peak)
    return metrics
