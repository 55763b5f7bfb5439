"""Activation checkpointing: the same gradients from less memory, for as many matrix products as the mode says."""

from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

from dapo.config.actor import GRADIENT_CHECKPOINTING
from dapo.workers.training.forward.attention import Segments, implementation
from dapo.workers.training.forward.recompute import checkpoint_activations

LAYERS, PRODUCTS = 3, 7  # q, k, v, o, gate, up, down
LENGTHS = (50, 14)


class Watch(TorchDispatchMode):
    """Counts operations, and knows which of the memory that they returned is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.name().partition(".")[0]] += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def held(self) -> int:
        """Bytes."""
        return sum(size for reference, size in self._made.values() if not reference.expired())

    def products(self) -> int:
        return self.calls["aten::mm"] + self.calls["aten::addmm"]

    def attentions(self) -> int:
        return sum(count for name, count in self.calls.items() if "dot_product" in name and "backward" not in name)


def run(mode: str) -> tuple[dict[str, torch.Tensor], Watch, int, tuple[int, int]]:
    """Gradients; operations of forward and backward; bytes held between; products and attentions of the forward."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": 40}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation("auto")).train()
    checkpoint_activations(model, mode)
    tokens = torch.randint(40, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    segments = Segments(LENGTHS, torch.tensor([0, 50, 64], dtype=torch.int32))
    with Watch() as watch:
        hidden = model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=None, use_cache=False, segments=segments
        ).last_hidden_state
        forward = watch.products(), watch.attentions()
        held = watch.held()
        hidden.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, watch, held, forward


def test_modes_trade_memory_for_matrix_products() -> None:
    found = {mode: run(mode) for mode in GRADIENT_CHECKPOINTING}
    gradients, watch, held, (products, attentions) = found["none"]
    assert products == LAYERS * PRODUCTS and attentions == LAYERS * len(LENGTHS)
    for mode, (own, _, _, forward) in found.items():
        assert own.keys() == gradients.keys() and forward == (products, attentions), mode
        for name, gradient in gradients.items():
            assert (own[name] - gradient).norm() <= 1e-6 * gradient.norm(), (mode, name)

    again = {mode: each[1].products() - watch.products() for mode, each in found.items()}
    # Without down, whose value no gradient needs; selective keeps k, o and up as well.
    assert again == {"none": 0, "selective": LAYERS * 3, "full": LAYERS * (PRODUCTS - 1)}
    attended = {mode: each[1].attentions() - watch.attentions() for mode, each in found.items()}
    assert attended == {"none": 0, "selective": 0, "full": attentions}
    kept = {mode: each[2] for mode, each in found.items()}
    assert kept["full"] < 0.6 * kept["selective"] and kept["selective"] < 0.6 * kept["none"], kept
