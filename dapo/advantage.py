"""Computes the group-relative baseline of DAPO Eq. 9 and its Dr. GRPO variant: rewards of groups in, advantages out.

Pure arithmetic on one tensor, done on the driver; every token of a response gets the advantage of its response.
"""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, *, normalize_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Returns (r - mean) / (std + eps) over each group, std with ddof 1 (Eq. 9; ddof and eps as in verl).

    rewards: [G, n], floating; NaN = unscorable, or padding of a short group. Returns [G, n] in the same dtype.
    Unscorable responses are left out of mean and std and get 0; so does every response of a group with fewer than two
    scored, or whose scored rewards are all equal. normalize_by_std false leaves out the division (Dr. GRPO, arXiv
    2503.20783).
    """
    scored = ~rewards.isnan()
    count = scored.sum(dim=1, keepdim=True)
    total = torch.where(scored, rewards, 0.0).sum(dim=1, keepdim=True)
    deviation = torch.where(scored, rewards - total / count.clamp(min=1), 0.0)
    # Equality is decided on the rewards: the mean of equal numbers may differ from them in the last bit.
    lowest = torch.where(scored, rewards, torch.inf).amin(dim=1, keepdim=True)
    highest = torch.where(scored, rewards, -torch.inf).amax(dim=1, keepdim=True)
    deviation = torch.where(lowest < highest, deviation, 0.0)
    if not normalize_by_std:
        return deviation
    variance = deviation.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return deviation / (variance.sqrt() + eps)
