"""Keeps Adam's moments in host memory while engines have the GPU. They are moved bit for bit; a checkpoint can be
written or read in either place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Moments:
    """Moves the sharded state of one optimizer between the GPU, for an update, and pinned host memory. On a CPU nothing
    moves. This is faster than optimizer steps on the host: the state is copied twice per update instead of per
    optimizer step, and the host computes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: str, *, moves: bool) -> None:
        """Moves the state to the host, if `moves`."""
        self._optimizer = optimizer
        self._device = device
        self._moves = moves and device != "cpu"
        self._places: dict[tuple[Any, str], DTensor] = {}  # host memory, allocated once
        self.to_host()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Has the state on the GPU in the block."""
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
        """Moves the state from the GPU to the host, also one that was just read from a checkpoint."""
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
        torch.cuda.synchronize()  # copies are complete, for a checkpoint, and GPU memory is free


def _pinned(value: DTensor) -> DTensor:
    """Returns a copy in pinned host memory. Raises RuntimeError if the driver refuses to pin it."""
    host = value.to("cpu")
    assert isinstance(host, DTensor)
    local = host.to_local()
    # As an int: a torch enum is true for any value.
    if local.nbytes and (error := int(torch.cuda.cudart().cudaHostRegister(local.data_ptr(), local.nbytes, 0))):
        raise RuntimeError(
            f"the CUDA driver does not pin {local.nbytes} bytes of host memory (error {error}) for "
            "`actor.offload=phase`; raise the limit of locked memory (ulimit -l), or set `actor.offload=none`"
        )
    return host
