"""Example of a user-defined loss (README.md, step by step); it is built in as `sapo`. Soft Adaptive Policy Optimization
(arXiv 2511.20347) lets the gradient of a token fade smoothly as its ratio leaves 1, where clipping sets it to zero:
loss = -A f(r) with f(r) = sigmoid(tau (r - 1)) 4 / tau, and tau larger for A < 0."""

import torch
from torch import Tensor

from dapo.loss import clamped_difference

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05  # the published values


def soft_gate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Returns a loss per token, [R], of the shape and type of `logprobs`."""
    ratio = clamped_difference(logprobs, old_logprobs).exp()
    tau = torch.where(advantages > 0, TAU_POSITIVE, TAU_NEGATIVE)
    return -advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
