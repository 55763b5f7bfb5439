"""Chooses the tokens of the highest entropy in a mini-batch: entropies of all ranks in, a mask per micro-batch out.

Only they carry the policy loss (`algorithm.entropy_top_share`, arXiv 2506.01939). The bound is one for the whole
mini-batch, so that neither packing nor the number of ranks changes what is trained.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workers.training.forward.ulysses import gather_rows
from workers.training.mesh import Mesh


@torch.no_grad()
def high_entropy(entropies: Sequence[Tensor], weights: Sequence[Tensor], share: float, mesh: Mesh) -> list[Tensor]:
    """Returns 1 for the `share` of the trained tokens with the highest entropy, rounded up and with those that equal
    the lowest of them, 0 for the rest; [R] per micro-batch. A collective over all ranks.

    entropies, weights: of this rank's micro-batches, [R] each; a token of weight 0 is not trained, and not counted.
    """
    own = torch.cat([entropy[weight != 0] for entropy, weight in zip(entropies, weights, strict=True)])
    everyone = _gather(own if mesh.sequence_parallel.rank == 0 else own[:0])  # ranks of one sequence hold the same
    bound = torch.full((), -math.inf, dtype=own.dtype, device=own.device)
    if len(everyone):
        count = max(1, math.ceil(share * len(everyone)))
        bound = everyone.kthvalue(len(everyone) - count + 1).values
    return [(entropy >= bound).to(entropy.dtype) for entropy in entropies]


def _gather(values: Tensor) -> Tensor:
    """Returns the values of all ranks, which may have any number each."""
    size = torch.tensor([len(values)], device=values.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    assert dist.group.WORLD is not None
    return gather_rows(values, tuple(map(int, sizes)), dist.group.WORLD)
