"""Router replay (R3, arXiv 2510.11370): the experts that the engine has used, in place of the actors' own choice.

Only which experts a token passes through is replaced. Their weights are the actors' own softmax at these experts, so
the routers are trained as without replay.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

OWN = -1  # in place of an expert: the router chooses itself


def routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Returns the router of each decoder layer with experts, by the layer's index."""
    layers = enumerate(getattr(model.base_model, "layers", ()))
    gates: dict[int, Any] = {index: getattr(getattr(layer, "mlp", None), "gate", None) for index, layer in layers}
    return {index: gate for index, gate in gates.items() if hasattr(gate, "top_k")}


def take_experts(model: PreTrainedModel) -> None:
    """Lets the decoder layers be called with `experts`, int16 [T, layers, k] in the engine's order or `OWN`. Activation
    checkpointing calls a layer with the same arguments again, so that it recomputes the same experts."""
    for index, router in routers(model).items():
        _Replay(index).attach(model.base_model.layers[index], router)


class _Replay:
    """The experts of one layer in the call under way."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._experts: Tensor | None = None

    def attach(self, layer: nn.Module, router: nn.Module) -> None:
        layer.register_forward_pre_hook(self._take, with_kwargs=True)
        router.register_forward_hook(self._replace)

    def _take(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        experts = kwargs.get("experts")
        self._experts = None if experts is None else experts[:, self._index].long()
        return args, {key: value for key, value in kwargs.items() if key != "experts"}

    def _replace(
        self, router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Changes (logits [T, experts], weights [T, k], indices [T, k])."""
        if self._experts is None:
            return output
        logits, own_weights, own = output
        experts = torch.where(self._experts == OWN, own, self._experts)
        weights = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):  # Mixtral has no such key, and always does
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(own_weights.dtype), experts
