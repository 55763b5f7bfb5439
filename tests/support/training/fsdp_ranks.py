"""What the tests of FSDP ask of a rank: its collectives and its memory."""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.training.plain_reference import rank_checksum, update_on
from workers.actor import RankWork


def counted(worker: Any, work: RankWork) -> tuple[int, int, str]:
    """Runs on a rank: micro-batches and all-reduces of an update, and the checksum after it."""
    plain, calls = torch.distributed.all_reduce, []

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return plain(*args, **kwargs)

    torch.distributed.all_reduce = all_reduce
    try:
        update_on(worker, work)
    finally:
        torch.distributed.all_reduce = plain
    return len(work.minibatches[0]), len(calls), rank_checksum(worker)


class Travelling(TorchDispatchMode):
    """Types of the tensors in each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            seen = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            self.types.setdefault(func._opname, set()).update(seen)
        return func(*args, **(kwargs or {}))


def travelling(worker: Any, work: RankWork) -> dict[str, set[torch.dtype]]:
    """Runs on a rank."""
    with Travelling() as seen:
        update_on(worker, work)
    return seen.types


def memory(worker: Any) -> tuple[set[str], set[str], set[type], int, int]:
    """Runs on a rank: types of the parameters that the modules show, devices of all state, offload policies, gradients
    that are held, bytes of gathered parameters."""
    policy, optimizer = worker._policy, worker._optimizer
    shown = list(policy.parameters())
    state = [value for each in optimizer.state.values() for value in each.values()]
    groups = [m._get_fsdp_state()._fsdp_param_group for m in policy.modules() if isinstance(m, FSDPModule)]
    gathered = sum(
        p._unsharded_param.untyped_storage().nbytes()
        for group in groups
        for p in group.fsdp_params
        if hasattr(p, "_unsharded_param")
    )
    return (
        {type(p.data).__name__ for p in shown},
        {str(tensor.device) for tensor in (*shown, *state)},
        {type(group.offload_policy) for group in groups},
        sum(p.grad is not None for p in shown),
        gathered,
    )
