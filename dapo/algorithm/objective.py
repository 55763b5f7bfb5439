"""Computes the objective of one optimizer step: policy loss, KL term and entropy bonus, with token weights. It returns
the scalar to differentiate, and detached values per token for the metrics (DAPO Eqs. 8-12). `rollout_correction`
computes the importance weight between the policy that sampled a token and the one that trains on it. With a ratio
against the actors' own old log-probabilities this is decoupled PPO (arXiv 2110.00641)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.algorithm.own.calls import own_policy_loss
from dapo.algorithm.own.loading import OwnFunction
from dapo.config.algorithm import ICEPOP, AlgorithmConfig, RolloutCorrectionConfig
from dapo.loss import (
    MAX_LOG_RATIO,
    cispo_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    kl_cov_loss,
    kl_penalty,
    policy_loss,
    reinforce_loss,
    sapo_loss,
    segment_sum,
)


@dataclass(frozen=True, slots=True)
class Constants:
    """Values without gradient, per response token, [R].

    old_logprobs: the policy's before the update, or the engines'. ref_logprobs: the reference policy's; None without a
    KL term. correction: factor of the policy loss (`rollout_correction`; 0 for tokens left out by
    `algorithm.entropy_top_share`, `clip_cov` or `off_policy_mask`). weights: `dapo.loss.token_weights`; a token of
    weight 0 is masked: its other values, NaN included, affect neither loss nor gradient nor metrics. segment_ids: int,
    the response of each token, counted from 0. chosen: 1 for the tokens that `kl_cov` holds, else 0; None: another
    loss. support_logprobs: [R, K], the engine's log-probabilities of its most likely tokens, padded by -inf; None
    without `algorithm.score_centering`.
    """

    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    correction: Tensor
    advantages: Tensor
    weights: Tensor
    segment_ids: Tensor
    chosen: Tensor | None = None
    support_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective and its parts. loss: scalar with gradient, the sum of weights x (policy loss + KL term - entropy
    bonus). The rest is detached, [R], and 0 or false for masked tokens: trained (bool: not masked), left_out (bool:
    the factor of the policy loss is 0), clipped_low, clipped_high, dual_clipped (bool: the lower bound, the upper
    bound, the dual clip binds), log_ratio (logp - old_logp), kl and entropy (nats)."""

    loss: Tensor
    trained: Tensor
    left_out: Tensor
    log_ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor
    kl: Tensor
    entropy: Tensor


def objective(
    logprobs: Tensor,
    entropy: Tensor,
    constants: Constants,
    cfg: AlgorithmConfig,
    own_loss: OwnFunction | None = None,
    support_logprobs: Tensor | None = None,
) -> Objective:
    """Returns the objective. logprobs, entropy: of the policy, [R], with gradient (entropy: if `entropy_coeff` is not
    0). own_loss: user-defined function in place of the built-in loss (`algorithm.policy_loss`). support_logprobs: of
    the policy, [R, K], with gradient, for the tokens of `constants.support_logprobs`."""
    masked = constants.weights == 0

    def keep(values: Tensor) -> Tensor:
        return values.masked_fill(masked, 0.0)  # also stops the gradient, which 0 x NaN would not

    logprobs, entropy = keep(logprobs), keep(entropy)
    old_logprobs, advantages = keep(constants.old_logprobs), keep(constants.advantages)
    # Masked tokens form their own segment: they are not part of any |o_i|.
    segments = (constants.segment_ids + 1).masked_fill(masked, 0)
    if own_loss is None:
        chosen = None if constants.chosen is None else keep(constants.chosen)
        per_token, stats = _policy_loss(logprobs, old_logprobs, advantages, segments, chosen, cfg)
    else:
        per_token, stats = own_policy_loss(own_loss, logprobs, old_logprobs, advantages, segments, cfg)
    per_token = per_token * keep(constants.correction)
    if support_logprobs is not None and constants.support_logprobs is not None:
        centering = score_centering(support_logprobs, constants.support_logprobs, cfg.rollout_correction)
        per_token = per_token + advantages * keep(centering)
    kl = logprobs.new_zeros(logprobs.shape)
    if constants.ref_logprobs is not None:
        kl = keep(kl_penalty(logprobs, keep(constants.ref_logprobs), cfg.kl.estimator))
        per_token = per_token + cfg.kl.loss_coeff * kl
    if cfg.entropy_coeff != 0:
        per_token = per_token - cfg.entropy_coeff * entropy
    log_ratio = -stats["approx_kl"]
    # The surrogate is clipped above the upper bound for A > 0 and below the lower one for A < 0, CISPO on both sides.
    upward = log_ratio > 0 if cfg.policy_loss == "cispo" else constants.advantages > 0
    return Objective(
        loss=(constants.weights * per_token).sum(),
        trained=~masked,
        left_out=(constants.correction == 0) & ~masked,
        log_ratio=log_ratio,
        clipped_low=stats["clipped"] & ~upward & ~masked,
        clipped_high=stats["clipped"] & upward & ~masked,
        dual_clipped=stats["dual_clipped"] & ~masked,
        kl=kl.detach(),
        entropy=entropy.detach(),
    )


def _policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segments: Tensor,
    chosen: Tensor | None,
    cfg: AlgorithmConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    low, high = cfg.clip_ratio_low, cfg.clip_ratio_high
    match cfg.policy_loss:
        case "gspo":
            return gspo_loss(logprobs, old_logprobs, advantages, segments, clip_ratio_low=low, clip_ratio_high=high)
        case "cispo":
            return cispo_loss(logprobs, old_logprobs, advantages, clip_ratio_low=low, clip_ratio_high=high)
        case "sapo":
            positive, negative = cfg.sapo.tau_positive, cfg.sapo.tau_negative
            return sapo_loss(logprobs, old_logprobs, advantages, tau_positive=positive, tau_negative=negative)
        case "gmpo":
            return gmpo_loss(logprobs, old_logprobs, advantages, segments, low=cfg.gmpo.low, high=cfg.gmpo.high)
        case "dppo_tv" | "dppo_kl" as name:  # the old log-probabilities are the engines'
            bound = cfg.dppo.max_tv if name == "dppo_tv" else cfg.dppo.max_kl
            kind, most = name.removeprefix("dppo_"), cfg.dppo.max_ratio
            return dppo_loss(logprobs, old_logprobs, advantages, divergence=kind, bound=bound, max_ratio=most)
        case "kl_cov":
            assert chosen is not None, "kl_cov without the tokens that it holds"
            return kl_cov_loss(logprobs, old_logprobs, advantages, cfg.kl_cov.coeff * chosen)
        case "reinforce":
            return reinforce_loss(logprobs, old_logprobs, advantages)
        case _:  # clip, and clip_cov, whose `correction` leaves tokens out
            c = cfg.clip_ratio_c
            return policy_loss(
                logprobs, old_logprobs, advantages, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c
            )


def score_centering(logprobs: Tensor, rollout_logprobs: Tensor, cfg: RolloutCorrectionConfig) -> Tensor:
    """Returns the term C of Score Centering (arXiv 2609.20807, Eq. 14) per token, [R]: its gradient is the mean of
    w(v) grad log p(v) over tokens v that the engine samples.

    logprobs, rollout_logprobs: of the policy p, with gradient, and of the engine q, for the engine's most likely tokens
    H of each position, both [R, K]; rollout_logprobs is -inf at padding. Outside of H the engine is taken to sample in
    proportion to the policy: q = rho p, rho = (1 - q(H)) / (1 - p(H)). w: the weight of `rollout_correction` on level
    token. Without tokens outside of H (truncated sampling) C is exact.
    """
    present = rollout_logprobs > -torch.inf
    p, q = logprobs.detach().exp().masked_fill(~present, 0.0), rollout_logprobs.exp()
    rho = (1 - q.sum(-1, keepdim=True)).clamp(min=0) / (1 - p.sum(-1, keepdim=True)).clamp(min=1e-6)
    match cfg.mode:
        case "truncate":  # w = min(p / q, upper)
            mass, tail = torch.minimum(p, cfg.upper * q), (cfg.upper * rho).clamp(max=1.0)
        case "mask" | "icepop":  # w = p / q within the bounds, else 0
            lower, upper = ICEPOP if cfg.mode == "icepop" else (cfg.lower, cfg.upper)
            mass = p.where((p >= lower * q) & (p <= upper * q), 0.0)
            tail = ((1 >= lower * rho) & (1 <= upper * rho)).to(p.dtype)
        case _:
            mass, tail = q, rho
    # The tail's part, the sum of tail x p grad log p outside of H, is minus the same sum over H.
    return ((mass - tail * p) * logprobs.masked_fill(~present, 0.0)).sum(-1)


@torch.no_grad()
def off_policy_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, segment_ids: Tensor, threshold: float
) -> Tensor:
    """Returns the off-policy sequence mask (arXiv 2512.02556, Eq. 9), [R]: 0 for the tokens of a response with A < 0
    whose mean of rollout_logp - logp is above `threshold`, in nats, else 1. Arguments as in `Constants`."""
    gap = segment_sum(rollout_logprobs - logprobs, segment_ids)
    mean = gap / segment_sum(torch.ones_like(gap), segment_ids)
    return torch.ones_like(gap).masked_fill((advantages < 0) & (mean > threshold), 0.0)


@dataclass(frozen=True, slots=True)
class Correction:
    """Values per response token, [R], without gradient. Made by `rollout_correction`, used by `Constants` and the
    metrics. difference: old - rollout log-probability, nats. ratio: importance ratio per token or response, before
    truncation or masking. weights: factor of the token's policy loss, 1 without correction. affected: truncated or
    masked."""

    difference: Tensor
    ratio: Tensor
    weights: Tensor
    affected: Tensor


@torch.no_grad()
def rollout_correction(
    old_logprobs: Tensor, rollout_logprobs: Tensor, segment_ids: Tensor, cfg: RolloutCorrectionConfig
) -> Correction:
    """Returns the weights exp(old - rollout) of tokens, truncated (TIS) or masked, and their ingredients.

    old_logprobs: by the actors before the first optimizer step; rollout_logprobs: by the engines; segment_ids: the
    response of each token, counted from 0; all [R]. Exponents are clamped to +-20. `level: sequence` takes the product
    of a response's ratios, `geometric` their geometric mean, the ratio of GSPO (arXiv 2507.18071, Eq. 7). A masked
    token still counts in the denominators. `icepop` masks by bounds of its own and is per token by the checks.
    """
    difference = old_logprobs - rollout_logprobs
    log_ratio = difference if cfg.level == "token" else segment_sum(difference, segment_ids)
    if cfg.level == "geometric":
        log_ratio = log_ratio / segment_sum(torch.ones_like(difference), segment_ids)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    match cfg.mode:
        case "truncate":
            affected = ratio > cfg.upper
            weights = ratio.clamp(max=cfg.upper)
        case "mask" | "icepop":
            lower, upper = ICEPOP if cfg.mode == "icepop" else (cfg.lower, cfg.upper)
            affected = (ratio < lower) | (ratio > upper)
            weights = ratio.masked_fill(affected, 0.0)
        case _:
            affected = torch.zeros_like(ratio, dtype=torch.bool)
            weights = torch.ones_like(ratio)
    return Correction(difference, ratio, weights, affected)
