"""Compares log-probabilities in chunks (`workers.training.forward.logprobs`) with whole logits and plain autograd:
sizes in, seconds out.

Both give log-probability and entropy and go backward through the first, or through both. On one thread, in CPU
seconds, with the two ways taking turns: other processes of a shared machine count little.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from workers.training.forward.logprobs import token_logprobs

Way = Callable[[Tensor], tuple[Tensor, Tensor]]


def compare(
    tokens: int, vocabulary: int, hidden_size: int, *, entropy_gradient: bool, repeats: int
) -> list[tuple[float, float]]:
    """Returns (CPU seconds in chunks, and whole) of each repetition; one before, which warms up, does not count."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden_size, vocabulary, bias=False)
    hidden, labels = torch.randn(tokens, hidden_size), torch.randint(0, vocabulary, (tokens,))

    def chunked(hidden: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, head, labels, 1.0, vocabulary, entropy_gradient=entropy_gradient)

    def whole(hidden: Tensor) -> tuple[Tensor, Tensor]:
        distribution = head(hidden).float().log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient):
            entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(1, labels[:, None])[:, 0], entropy

    def seconds(way: Way) -> float:
        own = hidden.clone().requires_grad_()
        head.zero_grad()
        began = time.process_time()
        logprobs, entropy = way(own)
        (logprobs.sum() + 0.01 * entropy.sum() if entropy_gradient else logprobs.sum()).backward()
        return time.process_time() - began

    return [(seconds(chunked), seconds(whole)) for _ in range(repeats + 1)][1:]
