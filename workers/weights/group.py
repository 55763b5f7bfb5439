"""Forms the process group of the weight sync: actor rank 0 and every worker process of every engine.

In: a store that rank 0 serves, and a place in the group. Out: broadcasts from rank 0, NCCL on GPU, gloo on CPU. It
stands next to the process groups that FSDP and vLLM make for themselves; the engines' half uses it as well.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SENDER = 0


class WeightGroup:
    """Returns from its constructor when all `size` processes are there; `timeout_s` bounds that and every broadcast."""

    def __init__(self, store: dist.Store, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        join = self._nccl if device.type == "cuda" else self._gloo
        self._group: Any = join(store, rank, size, device)  # torch's type stubs give a bare backend no collectives
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = SENDER, 0

    def _gloo(self, store: dist.Store, rank: int, size: int, device: torch.device) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, rank, size, self._timeout)

    def _nccl(
        self, store: dist.Store, rank: int, size: int, device: torch.device
    ) -> "dist.ProcessGroupNCCL":  # a torch without CUDA has none
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group._set_sequence_number_for_group()
        group.eager_connect_single_device(
            device
        )  # else the first bucket pays for it, and hangs where a rank is missing
        return group

    def broadcast(self, data: Tensor) -> dist.Work:
        """Sends rank 0's `data` [N] uint8 into everyone's, in the background; `wait` before touching it."""
        work: dist.Work = self._group.broadcast([data], self._options)
        return work

    def wait(self, work: dist.Work) -> None:
        """Waits for a broadcast. gloo: raises RuntimeError when the other end is gone or kept silent for `timeout_s`.
        NCCL: holds up the GPU's stream and not the caller; then its watchdog ends the process.
        """
        work.wait(self._timeout)
