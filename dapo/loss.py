"""Computes policy losses and KL penalties per token, and each token's weight in an optimizer step (DAPO Eqs. 8-12). The
loss of a step is the sum of weight x loss over its tokens (`dapo.algorithm.objective`). The weights are computed once
on the driver over the whole step, so that packing, micro-batches and the number of ranks do not change the gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dapo.config.algorithm import KL_ESTIMATORS, LOSS_AGG_MODES

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far beyond any clip bound, and still finite in bfloat16 and float32
MAX_KL = 10.0  # bound on one token's k3, as in verl


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the clipped surrogate with decoupled bounds (clip-higher, Eq. 10) and dual clip (arXiv 1912.09729).

    loss = max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A c, with r = exp(logp - old_logp) and the
    exponent clamped to +-20.
    Log-probabilities are natural and of any shape; the loss has their shape and dtype. Advantages have that shape or
    broadcast to it. The second value holds, per token and without gradient: "clipped" (bool: the clipped branch is
    strictly larger), "dual_clipped" (bool: the cap of c binds), "approx_kl" (float: old - new log-probability,
    clamped). Raises ValueError when the shapes do not fit.
    """
    log_ratio = clamped_difference(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    pessimistic = torch.maximum(unclipped, clipped)
    cap = -advantages * clip_ratio_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(pessimistic, cap), pessimistic)
    stats = _stats(log_ratio, clipped > unclipped, dual_clipped=negative & (pessimistic > cap))
    return _checked(loss, logprobs, old_logprobs, advantages), stats


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segment_ids: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of GSPO (arXiv 2507.18071, Eqs. 5-7): one ratio s per response.

    All tensors are [R], the response tokens of whole responses laid end to end; segment_ids: int [R], the response of
    each token, counted from 0. s = exp(mean over the response of logp - old_logp). Every token gets the loss max(-A s,
    -A clip(s, 1 - low, 1 + high)) of its response, so that `seq-mean-token-mean` weights give Eq. 5. Its gradient flows
    through the token's own log-probability (GSPO-token, Eqs. 13-14). For the whole response this is the same, but a
    factor per token (`rollout_correction` with level token) affects its own token only: a masked one has no gradient.
    The bounds are of the order of 3e-4 and 4e-4. Second value as in `policy_loss`; "dual_clipped" is false everywhere.
    """
    log_ratio = clamped_difference(logprobs, old_logprobs)
    through_own = log_ratio - log_ratio.detach()
    lengths = segment_sum(torch.ones_like(log_ratio), segment_ids)
    ratio = (segment_sum(log_ratio.detach(), segment_ids) / lengths + through_own).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = _checked(torch.maximum(unclipped, clipped), logprobs, old_logprobs, advantages)
    return loss, _stats(log_ratio, clipped > unclipped)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of CISPO (arXiv 2506.13585, Eqs. 4-5): -A sg(clip(r, 1 - low, 1 + high)) logp. No token loses
    its gradient, and none flows into `old_logprobs`. The paper bounds the weight from above only: use clip_ratio_low 1
    for that. Shapes and second value as in `policy_loss`; "clipped": the weight is not the ratio; "dual_clipped" is
    false everywhere."""
    log_ratio = clamped_difference(logprobs, old_logprobs).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = _checked(-advantages * weight * logprobs, logprobs, old_logprobs, advantages)
    return loss, _stats(log_ratio, weight != ratio)


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of SAPO (arXiv 2511.20347): -A sigmoid(tau (r - 1)) 4 / tau, with tau_positive where A > 0 and
    else tau_negative. Its gradient at r = 1 is that of -A r. Shapes and second value as in `policy_loss`; nothing is
    clipped."""
    log_ratio = clamped_difference(logprobs, old_logprobs)
    tau = torch.where(advantages > 0, advantages.new_full((), tau_positive), advantages.new_full((), tau_negative))
    loss = -advantages * torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * 4.0 / tau
    return _checked(loss, logprobs, old_logprobs, advantages), _stats(log_ratio, torch.zeros_like(loss).bool())


def gmpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, segment_ids: Tensor, *, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of GMPO (arXiv 2507.20673): -A s, with one s per response, the geometric mean of its tokens'
    ratios. Before the mean a log-ratio is clipped, at most `high` where A > 0 and at least -`low` where A < 0.
    Arguments, the gradient through the token's own log-probability, and second value as in `gspo_loss`."""
    log_ratio = clamped_difference(logprobs, old_logprobs)
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    lengths = segment_sum(torch.ones_like(log_ratio), segment_ids)
    mean = segment_sum(bounded.detach(), segment_ids) / lengths
    loss = -advantages * (mean + bounded - bounded.detach()).exp()
    clipped = (bounded != log_ratio) & (advantages != 0)
    return _checked(loss, logprobs, old_logprobs, advantages), _stats(log_ratio, clipped)


def dppo_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: str,
    bound: float,
    max_ratio: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of DPPO (arXiv 2602.04879): -A sg(min(r, max_ratio)) logp, with r the ratio to the policy that
    sampled, and 0 for a token that is outside its trust region: its probability is above the sampler's where A > 0, or
    below where A < 0, and the divergence of the two is above `bound`. divergence: "tv", |p - q|, or "kl", in nats, of
    the sampler's (q, 1 - q) to (p, 1 - p), the token against all others. Shapes and second value as in `policy_loss`;
    "clipped": outside, "dual_clipped": inside, and max_ratio binds."""
    log_ratio = clamped_difference(logprobs, rollout_logprobs).detach()
    p, q = logprobs.detach().exp(), rollout_logprobs.exp()
    moved = (p - q) * advantages.sign()
    outside = moved > bound
    if divergence == "kl":
        rest_p, rest_q = ((-torch.expm1(one)).clamp(min=0.0) for one in (logprobs.detach(), rollout_logprobs))
        kl = -q * log_ratio + torch.xlogy(rest_q, rest_q) - torch.xlogy(rest_q, rest_p)
        outside = (moved > 0) & (kl > bound)
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=max_ratio).masked_fill(outside, 0.0)
    loss = _checked(-advantages * weight * logprobs, logprobs, rollout_logprobs, advantages)
    return loss, _stats(log_ratio, outside, dual_clipped=(ratio > max_ratio) & ~outside)


def kl_cov_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, penalties: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of KL-Cov (arXiv 2505.22617): -A r + penalty |logp - old_logp|. penalties: the factor for each
    token, 0 for most; it has no gradient where nothing has moved. Shapes and second value as in `policy_loss`; nothing
    is clipped."""
    log_ratio = clamped_difference(logprobs, old_logprobs)
    loss = -advantages * log_ratio.exp() + penalties * log_ratio.abs()
    return _checked(loss, logprobs, old_logprobs, advantages), _stats(log_ratio, torch.zeros_like(loss).bool())


def reinforce_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns -A logp (REINFORCE, arXiv 2402.14740). Shapes and second value as in `policy_loss`; nothing is
    clipped."""
    loss = _checked(-advantages * logprobs, logprobs, old_logprobs, advantages)
    return loss, _stats(clamped_difference(logprobs, old_logprobs), torch.zeros_like(loss).bool())


def _stats(log_ratio: Tensor, clipped: Tensor, dual_clipped: Tensor | None = None) -> dict[str, Tensor]:
    dual_clipped = torch.zeros_like(clipped) if dual_clipped is None else dual_clipped
    return {"clipped": clipped, "dual_clipped": dual_clipped, "approx_kl": -log_ratio.detach()}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates KL(policy || reference) per token, from tokens that the policy sampled, in nats; any shape. With d =
    ref - logp, clamped to +-20: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1, clamped to +-10 (the estimators of
    "Approximating KL Divergence", 2020). The gradient is k2's for all three, straight-through: its mean is the gradient
    of the KL, while k1's own has mean zero and k3's is biased. Raises ValueError for an unknown estimator."""
    difference = clamped_difference(ref_logprobs, logprobs)
    k2 = 0.5 * difference.square()
    match estimator:
        case "k1":
            value = -difference.detach()
        case "k2":
            return k2
        case "k3":
            value = (difference.exp() - difference - 1.0).clamp(-MAX_KL, MAX_KL).detach()
        case _:
            raise ValueError(f"`algorithm.kl.estimator` ({estimator!r}) must be one of {', '.join(KL_ESTIMATORS)}")
    return value + (k2 - k2.detach())


def clamped_difference(left: Tensor, right: Tensor) -> Tensor:
    """Returns left - right, clamped to +-20, so that its exp is finite."""
    return (left - right).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def segment_sum(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Returns for each token the sum over its segment, [R]; segment_ids: int [R], from 0 to R."""
    sums = values.new_zeros(len(values) + 1)  # the number of segments would have to be read from the device
    return sums.index_add(0, segment_ids, values).index_select(0, segment_ids)


def _checked(loss: Tensor, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Raises if shapes differ: broadcasting [N] against [N, 1] would silently train on every pair."""
    if loss.shape != logprobs.shape:
        raise ValueError(
            f"`old_logprobs` {tuple(old_logprobs.shape)} and `advantages` {tuple(advantages.shape)} must fit "
            f"`logprobs` {tuple(logprobs.shape)}; give one advantage per token"
        )
    return loss


def token_weights(
    response_lengths: Tensor,
    mode: str,
    *,
    group_sizes: Sequence[int] | Tensor | None = None,
    max_response_length: int | None = None,
) -> Tensor:
    """Returns the weight of each token of each response in the loss of one optimizer step.

    response_lengths: int [N], trained tokens |o_i| of the N responses of the step; 0 = masked response. Returns float
    [N] (torch's default dtype). With N, P and the sums over responses and groups that have at least one token:
    - token-mean: 1 / sum |o| (DAPO, Eq. 12)
    - group-token-mean: 1 / (P * sum of |o| over the group) (Eq. 8 read per prompt)
    - seq-mean-token-mean: 1 / (N |o_i|) (GRPO)
    - seq-mean-token-sum: 1 / N
    - seq-mean-token-sum-norm: 1 / (N max_response_length) (Dr. GRPO)
    group_sizes: [P], responses per group, in the order of response_lengths; needed by group-token-mean.
    max_response_length: tokens, needed by seq-mean-token-sum-norm. Masked responses get 0; all masked: all 0. Raises
    ValueError for an unknown mode or a missing or mismatched argument.
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
    """Returns P times the tokens of each response's group, [N]; P counts the groups that have tokens."""
    sizes = torch.as_tensor([] if group_sizes is None else group_sizes, dtype=torch.long, device=lengths.device)
    if int(sizes.sum()) != len(lengths):
        raise ValueError(
            f"`algorithm.loss_agg_mode` 'group-token-mean' needs `group_sizes` that sum to the {len(lengths)} "
            f"responses, not {int(sizes.sum())}; give the number of responses of each group"
        )
    group_of = torch.repeat_interleave(torch.arange(len(sizes), device=lengths.device), sizes)
    tokens = torch.zeros(len(sizes), dtype=lengths.dtype, device=lengths.device).index_add_(0, group_of, lengths)
    return (tokens > 0).sum() * tokens[group_of]
