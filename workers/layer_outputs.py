"""Keeps what the layers of a model return, to compare an engine's with those of an actor rank."""

import re
from functools import partial

import torch
from torch import Tensor, nn

# Embedding and norms of the model, its decoder layers, and their parts: alike in transformers and vLLM.
POINTS = re.compile(r"\w+\.(\w+|\w+\.\d+(\.\w+)?)")


class LayerOutputs:
    """Records from its creation until `take`."""

    def __init__(self, model: nn.Module) -> None:
        self._rows: dict[str, list[Tensor]] = {}
        named = [(name, module) for name, module in model.named_modules() if POINTS.fullmatch(name)]
        self._hooks = [module.register_forward_hook(partial(self._keep, name)) for name, module in named]

    def _keep(self, name: str, module: nn.Module, given: object, output: object) -> None:
        first, *others = output if isinstance(output, tuple) else (output,)
        if not isinstance(first, Tensor):
            return
        whole_layer = name.rpartition(".")[2].isdigit()
        if whole_layer and others and isinstance(others[0], Tensor) and others[0].shape == first.shape:
            first = first + others[0]  # vLLM adds the residual in the next layer
        rows = first.detach().flatten(end_dim=-2).to("cpu", torch.float32, copy=True)  # kernels may overwrite it
        self._rows.setdefault(name, []).append(rows)

    def take(self) -> dict[str, Tensor]:
        """Ends the recording. Returns a row per token in float32, [T, width], by module in the order of their first
        results; T is over all calls."""
        for hook in self._hooks:
            hook.remove()
        return {name: torch.cat(rows) for name, rows in self._rows.items()}
