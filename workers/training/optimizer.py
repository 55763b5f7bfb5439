"""AdamW over the shards, its state in host memory between updates (`actor.offload=phase`), and loss scaling."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dapo.config.schema import Config

FIRST, FLOOR = 2.0**16, 1.0  # loss scales
GROWTH_INTERVAL = 200  # finite optimizer steps, after which the scale doubles
KEY = "loss_scale"  # in a checkpoint


def build_optimizer(policy: nn.Module, cfg: Config) -> torch.optim.AdamW:
    """Returns AdamW over the trained shards; the fused kernel exists on CPU and GPU."""
    optim = cfg.actor.optim
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    beta1, beta2 = optim.betas
    optimizer = torch.optim.AdamW(
        trained, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )
    # The state of AdamW's first step. Otherwise torch.distributed.checkpoint creates it on save or load, by an empty
    # step that the bias correction then counts.
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


class Moments:
    """Keeps an optimizer's sharded state in pinned host memory while engines have the GPU; copied bit for bit. On a CPU
    nothing moves. This is faster than optimizer steps on the host: two copies per update, and the host computes
    nothing."""

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


class LossScale:
    """Scales the loss for float16, whose smallest number is 6e-8. The factor, equal on all ranks, halves after a step
    with gradients that are not finite and doubles after many finite ones. Every method does nothing for other dtypes.
    """

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
