"""The policy objective per token, and the weight of each token in the loss of one optimizer step (DAPO Eqs. 8-12).

In: log-probabilities and advantages of tokens, or lengths of responses; out: tensors of the same shape. The loss of a
step is the sum of weight x loss over its tokens: the weights are made once on the driver over the whole step, so that
neither packing nor micro-batches nor the number of ranks changes the gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dapo.config import LOSS_AGG_MODES

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far beyond any clip bound, and still finite in bfloat16 and float32


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate with decoupled bounds (clip-higher, Eq. 10) and dual clip (arXiv 1912.09729).

    loss = max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A c, with r = exp(logp - old_logp) and the
    exponent clamped to +-20.

    Log-probabilities are natural and of any shape, which the loss keeps with the dtype; advantages have that shape or
    broadcast to it. The second value holds, per token and without gradient: "clipped" (bool: the clipped branch is
    strictly larger), "dual_clipped" (bool: the cap of c binds), "approx_kl" (float: old - new log-probability,
    clamped). Raises ValueError when the shapes do not fit.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    pessimistic = torch.maximum(unclipped, clipped)
    cap = -advantages * clip_ratio_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(pessimistic, cap), pessimistic)
    if loss.shape != logprobs.shape:
        # Broadcasting [N] against [N, 1] would quietly train on every pair.
        raise ValueError(
            f"`old_logprobs` {tuple(old_logprobs.shape)} and `advantages` {tuple(advantages.shape)} must fit "
            f"`logprobs` {tuple(logprobs.shape)}; give one advantage per token"
        )
    stats = {
        "clipped": clipped > unclipped,
        "dual_clipped": negative & (pessimistic > cap),
        "approx_kl": -log_ratio.detach(),
    }
    return loss, stats


def token_weights(
    response_lengths: Tensor,
    mode: str,
    *,
    group_sizes: Sequence[int] | Tensor | None = None,
    max_response_length: int | None = None,
) -> Tensor:
    """Weight of each token of each response in the loss of one optimizer step.

    response_lengths: int [N], trained tokens |o_i| of the N responses of the step; 0 = masked response. Returns float
    [N] (torch's default dtype). With N, P and the sums over responses and groups that have at least one token:

    - token-mean: 1 / sum |o| (DAPO, Eq. 12)
    - group-token-mean: 1 / (P * sum of |o| over the group) (Eq. 8 read per prompt)
    - seq-mean-token-mean: 1 / (N |o_i|) (GRPO)
    - seq-mean-token-sum: 1 / N
    - seq-mean-token-sum-norm: 1 / (N max_response_length) (Dr. GRPO)

    group_sizes: [P], responses per group, in the order of response_lengths; needed by group-token-mean.
    max_response_length: tokens, needed by seq-mean-token-sum-norm. Masked responses get 0; all masked: all 0.
    Raises ValueError for an unknown mode or a missing or ill-fitting argument.
    """
    lengths = response_lengths.to(torch.float64)
    valid = lengths > 0
    num_valid = valid.sum().clamp(min=1)
    match mode:
        case "token-mean":
            divisor = lengths.sum().expand_as(lengths)
        case "group-token-mean":
            divisor = _group_divisor(lengths, group_sizes)
        case "seq-mean-token-mean":
            divisor = num_valid * lengths
        case "seq-mean-token-sum":
            divisor = num_valid.expand_as(lengths)
        case "seq-mean-token-sum-norm":
            if max_response_length is None or max_response_length < 1:
                raise ValueError(
                    f"`algorithm.loss_agg_mode` {mode!r} divides by `data.max_response_length` "
                    f"({max_response_length}); give a positive number of tokens"
                )
            divisor = (num_valid * max_response_length).expand_as(lengths)
        case _:
            raise ValueError(f"`algorithm.loss_agg_mode` ({mode!r}) must be one of {', '.join(LOSS_AGG_MODES)}")
    weights = torch.where(valid, 1.0 / divisor, 0.0)
    return weights.to(torch.get_default_dtype())


def _group_divisor(lengths: Tensor, group_sizes: Sequence[int] | Tensor | None) -> Tensor:
    """P times the tokens of each response's group, [N]; P counts the groups that have tokens."""
    sizes = torch.as_tensor([] if group_sizes is None else group_sizes, dtype=torch.long, device=lengths.device)
    if int(sizes.sum()) != len(lengths):
        raise ValueError(
            f"`algorithm.loss_agg_mode` 'group-token-mean' needs `group_sizes` that sum to the {len(lengths)} "
            f"responses, not {int(sizes.sum())}; give the number of responses of each group"
        )
    group_of = torch.repeat_interleave(torch.arange(len(sizes), device=lengths.device), sizes)
    tokens = torch.zeros(len(sizes), dtype=lengths.dtype, device=lengths.device).index_add_(0, group_of, lengths)
    return (tokens > 0).sum() * tokens[group_of]
