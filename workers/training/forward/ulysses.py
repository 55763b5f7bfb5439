"""Ulysses sequence parallelism (arXiv 2309.14509): sequence-parallel ranks exchange tokens for heads.

Each rank has part of the tokens with all heads; around attention, all tokens with part of the heads. At the end, every
rank's response tokens are gathered on all. Each function is a differentiable collective over the group.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Exchange(torch.autograd.Function):
    """Exchange over the first dimension, of the group's size; it is its own inverse and its own gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks in rank order. All ranks compute the same from them: the gradient is a slice."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        rank = dist.get_rank(group)
        ctx.start, ctx.count = sum(counts[:rank]), counts[rank]
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: counts[rank]] = own
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, group=group)
        return torch.cat([rows[:count] for rows, count in zip(received, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.start : ctx.start + ctx.count], None, None


def scatter_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Exchanges each [1, H, T / size, D], H a multiple of size, for [1, H / size, T, D], all in one exchange."""
    size = dist.get_world_size(group)
    parts = [tensor.squeeze(0).unflatten(0, (size, -1)) for tensor in tensors]
    by_source = _Exchange.apply(torch.cat(parts, dim=1), group)
    whole = by_source.transpose(0, 1).flatten(1, 2)
    return [tensor.unsqueeze(0) for tensor in whole.split([part.shape[1] for part in parts])]


def gather_heads(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges [1, T, H / size, D] -> [1, T / size, H, D]."""
    by_token = out.squeeze(0).unflatten(0, (dist.get_world_size(group), -1))
    by_head = _Exchange.apply(by_token, group)
    return by_head.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def gather_rows(own: Tensor, counts: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Gathers [counts[rank], ...] of each rank -> [sum of counts, ...] on all; sends nothing if all are empty."""
    return _Gather.apply(own, counts, group) if max(counts) else own
