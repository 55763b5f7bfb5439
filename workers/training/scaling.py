"""Scales the loss in float16, whose smallest number is 6e-8: gradients are computed of a multiple of the loss.

In: the gradients of an optimizer step. Out: the factor, which halves after a step in which they were not finite and
doubles after many in which they were. torch's `GradScaler` does the work, on FSDP2's shards too: all ranks learn of a
number that is not finite on one of them.
"""

import torch
from torch import Tensor

FIRST, FLOOR = 2.0**16, 1.0
GROWTH_INTERVAL = 200  # finite optimizer steps, after which the scale doubles
KEY = "loss_scale"  # in a checkpoint


class LossScale:
    """Holds the scale, equal on all ranks. Every method does nothing where the compute type is not float16."""

    def __init__(self, dtype: str, device: str) -> None:
        """Takes `model.dtype` and the type of device that the gradients are on: those in host memory torch would divide
        by a copy of a GPU's scale, without waiting until it is there."""
        self.enabled = dtype == "float16"
        self._scaler = torch.amp.GradScaler(
            device, init_scale=FIRST, growth_interval=GROWTH_INTERVAL, enabled=self.enabled
        )
        self._scaler.scale(torch.zeros((), device=device))  # makes its tensors, without which there is no state

    @property
    def value(self) -> float:
        """Returns the factor; 1 without scaling."""
        return self._scaler.get_scale()

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the loss whose gradient is to be computed."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale. A collective, once per optimizer step."""
        self._scaler.unscale_(optimizer)

    def update(self) -> bool:
        """Adapts the scale to the gradients of the last `unscale`; returns whether it could fall, and did."""
        before = self.value
        self._scaler.update()
        if self.value < FLOOR:
            self._scaler.update(FLOOR)
        return self.value < before

    def forget(self) -> None:
        """Leaves the scale as it was before the last `unscale`, whose gradients nobody uses."""
        self._scaler.update(self.value)

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint holds: nothing without scaling."""
        if not self.enabled:
            return {}
        state = self._scaler.state_dict()
        return {KEY: torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes what `state` returned where there is scaling."""
        scale, growth = state[KEY].tolist()
        self._scaler.load_state_dict({**self._scaler.state_dict(), "scale": scale, "_growth_tracker": round(growth)})
