"""Keeps Adam's moments in host memory while engines have the GPU.

In: an optimizer whose state is on the GPU. Out: the same state elsewhere, to the bit; a checkpoint is written or read
wherever it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Moments:
    """Moves the sharded state of one optimizer between the GPU, for an update, and pinned host memory.

    Faster than to step on the host: state travels twice per update and not per optimizer step, and the host computes
    nothing. On a CPU nothing moves.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: str, *, moves: bool) -> None:
        """Moves the state to the host, where it `moves` at all."""
        self._optimizer = optimizer
        self._device = device
        self._moves = moves and device != "cpu"
        self._places: dict[tuple[Any, str], DTensor] = {}  # in host memory, taken once
        self.to_host()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Has the state on the GPU while the block runs."""
        if self._moves:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, DTensor):
                        state[name] = value.to(self._device, non_blocking=True)
        try:
            yield
        finally:
            self.to_host()

    def to_host(self) -> None:
        """Frees the GPU of the state: also of one that was just read from a checkpoint."""
        if not self._moves:
            return
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, DTensor) and value.to_local().device.type != "cpu":
                    if (parameter, name) not in self._places:
                        self._places[parameter, name] = _pinned(value)
                    place = self._places[parameter, name]
                    place.to_local().copy_(value.to_local(), non_blocking=True)
                    state[name] = place
        torch.cuda.synchronize()  # all is there, for a checkpoint, and the GPU's memory is free


def _pinned(value: DTensor) -> DTensor:
    """Returns a copy in host memory that the GPU can read and write by itself. Raises RuntimeError where the driver
    refuses to pin it."""
    host = value.to("cpu")
    assert isinstance(host, DTensor)
    local = host.to_local()
    # An int, for an enum of torch's is true whatever its value.
    if local.nbytes and (error := int(torch.cuda.cudart().cudaHostRegister(local.data_ptr(), local.nbytes, 0))):
        raise RuntimeError(
            f"the CUDA driver does not pin {local.nbytes} bytes of host memory (error {error}) for "
            "`actor.offload=phase`; raise the limit of locked memory (ulimit -l), or set `actor.offload=none`"
        )
    return host
