"""Loss scaling for float16, whose smallest number is 6e-8: gradients are computed of a multiple of the loss.

The factor halves after a step with gradients that are not finite and doubles after many finite ones. torch's
`GradScaler` does the work, also on FSDP2's shards: all ranks see a non-finite number of any rank.
"""

import torch
from torch import Tensor

FIRST, FLOOR = 2.0**16, 1.0
GROWTH_INTERVAL = 200  # finite optimizer steps, after which the scale doubles
KEY = "loss_scale"  # in a checkpoint


class LossScale:
    """The scale, equal on all ranks. Every method does nothing unless the compute dtype is float16."""

    def __init__(self, dtype: str, device: str) -> None:
        """device: the device type of the gradients. torch would divide gradients in host memory by an asynchronous copy
        of a GPU's scale, possibly before it is complete."""
        self.enabled = dtype == "float16"
        self._scaler = torch.amp.GradScaler(
            device, init_scale=FIRST, growth_interval=GROWTH_INTERVAL, enabled=self.enabled
        )
        self._scaler.scale(torch.zeros((), device=device))  # creates its tensors, without which there is no state

    @property
    def value(self) -> float:
        return self._scaler.get_scale()

    def scaled(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale. A collective, once per optimizer step."""
        self._scaler.unscale_(optimizer)

    def update(self) -> bool:
        """Adapts the scale to the gradients of the last `unscale`; returns whether it fell."""
        before = self.value
        self._scaler.update()
        if self.value < FLOOR:
            self._scaler.update(FLOOR)
        return self.value < before

    def forget(self) -> None:
        """Keeps the scale from before the last `unscale`, whose gradients are not used."""
        self._scaler.update(self.value)

    def state(self) -> dict[str, Tensor]:
        """Returns the state for a checkpoint; empty without scaling."""
        if not self.enabled:
            return {}
        state = self._scaler.state_dict()
        return {KEY: torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        scale, growth = state[KEY].tolist()
        self._scaler.load_state_dict({**self._scaler.state_dict(), "scale": scale, "_growth_tracker": round(growth)})
