"""Corrects for the mismatch between the policy that sampled and the one that trains.

In: log-probabilities of the same tokens by the actors (before the first optimizer step) and by the engines. Out: the
detached weight exp(old - rollout) of each token, truncated (TIS) or masked, and what it was made of.
Together with a ratio against the actors' own old log-probabilities this is decoupled PPO (arXiv 2110.00641).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.config.algorithm import RolloutCorrectionConfig
from dapo.loss import MAX_LOG_RATIO, segment_sum


@dataclass(frozen=True, slots=True)
class Correction:
    """Holds values per response token, [R], without gradient. Made by `rollout_correction`, consumed by
    `dapo.objective`.

    difference: old - rollout log-probability, nats. ratio: importance ratio per token or response, before truncation or
    masking. weights: factor of the token's policy loss, 1 without correction. affected: truncated or masked.
    """

    difference: Tensor
    ratio: Tensor
    weights: Tensor
    affected: Tensor


@torch.no_grad()
def rollout_correction(
    old_logprobs: Tensor, rollout_logprobs: Tensor, segment_ids: Tensor, cfg: RolloutCorrectionConfig
) -> Correction:
    """Returns the correction of each token; all tensors are [R], segment_ids is the response of each token from 0.
    Exponents are clamped to +-20.

    `level: sequence` takes the product of a response's ratios. A masked token keeps its place in the denominators.
    """
    difference = old_logprobs - rollout_logprobs
    log_ratio = segment_sum(difference, segment_ids) if cfg.level == "sequence" else difference
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    match cfg.mode:
        case "truncate":
            affected = ratio > cfg.upper
            weights = ratio.clamp(max=cfg.upper)
        case "mask":
            affected = (ratio < cfg.lower) | (ratio > cfg.upper)
            weights = ratio.masked_fill(affected, 0.0)
        case _:
            affected = torch.zeros_like(ratio, dtype=torch.bool)
            weights = torch.ones_like(ratio)
    return Correction(difference, ratio, weights, affected)
