"""Computes advantages from rewards: the group-relative baseline of DAPO Eq. 9, its Dr. GRPO variant, and others. It
runs on the driver; every token of a response gets the advantage of its response."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, *, normalize_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Returns (r - mean) / (std + eps) over each group, std with ddof 1 (Eq. 9; ddof and eps as in verl). rewards: [G,
    n], floating; NaN = unscorable, or padding of a short group. Returns [G, n] in the same dtype. Unscorable responses
    are excluded from mean and std and get 0. Every response gets 0 in a group with fewer than two scored ones, or with
    equal scored rewards. normalize_by_std false omits the division (Dr. GRPO, arXiv 2503.20783)."""
    deviation, count = _deviation(rewards)
    if not normalize_by_std:
        return deviation
    variance = deviation.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return deviation / (variance.sqrt() + eps)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """Returns r - mean of the other scored responses of the group (leave-one-out, arXiv 2402.14740); [G, n]."""
    deviation, count = _deviation(rewards)
    return deviation * count / (count - 1).clamp(min=1)


def reinforce_plus_plus_advantages(rewards: Tensor, lengths: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Returns (r - mean) / (std + eps) over all tokens of the batch (REINFORCE++, arXiv 2501.03262, without baseline).
    lengths: [G, n], tokens of each response; std has ddof 1. If all rewards are equal, all advantages are 0. The
    paper's penalty per token is one per response here, if `algorithm.kl.reward_coeff` is set."""
    scored = ~rewards.isnan()
    tokens = torch.where(scored, lengths, 0).to(rewards.dtype)
    total = tokens.sum().clamp(min=1.0)
    deviation = torch.where(scored, rewards - (tokens * rewards.nan_to_num()).sum() / total, 0.0)
    if not scored.any() or bool((rewards[scored] == rewards[scored][0]).all()):
        return torch.zeros_like(rewards)
    variance = (tokens * deviation.square()).sum() / (total - 1.0).clamp(min=1.0)
    return deviation / (variance.sqrt() + eps)


def decoupled_advantages(parts: Tensor, part_weights: Tensor, *, normalize_by_std: bool = True) -> Tensor:
    """Returns the weighted sum of `group_advantages` of each part of the reward (GDPO, arXiv 2601.05242); [G, n].
    parts: [G, n, K], NaN if a response has none; part_weights: [K], a part's factor in the reward. The paper then
    scales over the batch: `algorithm.advantage.whiten`."""
    each = [group_advantages(part, normalize_by_std=normalize_by_std) for part in parts.unbind(dim=2)]
    return (torch.stack(each, dim=2) * part_weights).sum(dim=2)


def _deviation(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Returns r - mean of the group, [G, n], and the number of scored responses of each group, [G, 1]."""
    scored = ~rewards.isnan()
    count = scored.sum(dim=1, keepdim=True)
    total = torch.where(scored, rewards, 0.0).sum(dim=1, keepdim=True)
    deviation = torch.where(scored, rewards - total / count.clamp(min=1), 0.0)
    # Test equality on the rewards: the mean of equal numbers may differ from them in the last bit.
    lowest = torch.where(scored, rewards, torch.inf).amin(dim=1, keepdim=True)
    highest = torch.where(scored, rewards, -torch.inf).amax(dim=1, keepdim=True)
    return torch.where(lowest < highest, deviation, 0.0), count
