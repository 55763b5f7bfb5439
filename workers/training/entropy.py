"""Selects the tokens of highest entropy in a mini-batch; only these carry the policy loss
(`algorithm.entropy_top_share`, arXiv 2506.01939). The threshold is one for the mini-batch on all ranks, so that neither
packing nor the number of ranks changes what is trained."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workers.training.forward.ulysses import gather_rows
from workers.training.mesh import Mesh


@torch.no_grad()
def high_entropy(entropies: Sequence[Tensor], weights: Sequence[Tensor], share: float, mesh: Mesh) -> list[Tensor]:
    """Returns a mask [R] per micro-batch: 1 for the `share` of the trained tokens with the highest entropy, else 0. The
    number of tokens is rounded up and ties are included. entropies, weights: [R] per micro-batch of this rank; tokens
    of weight 0 are not trained and not counted. A collective over all ranks."""
    own = torch.cat([entropy[weight != 0] for entropy, weight in zip(entropies, weights, strict=True)])
    everyone = _gather(own if mesh.sequence_parallel.rank == 0 else own[:0])  # ranks of one sequence have equal values
    bound = torch.full((), -math.inf, dtype=own.dtype, device=own.device)
    if len(everyone):
        count = max(1, math.ceil(share * len(everyone)))
        bound = everyone.kthvalue(len(everyone) - count + 1).values
    return [(entropy >= bound).to(entropy.dtype) for entropy in entropies]


def _gather(values: Tensor) -> Tensor:
    """Concatenates the values of all ranks, whose numbers of values may differ."""
    size = torch.tensor([len(values)], device=values.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    assert dist.group.WORLD is not None
    return gather_rows(values, tuple(map(int, sizes)), dist.group.WORLD)
