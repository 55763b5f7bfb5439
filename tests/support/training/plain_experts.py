"""A mixture of experts as loops over tokens and given experts, in float64, in place of transformers' layers."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dapo.types import Experts, TrainSequence


def with_random_experts(
    sequences: Sequence[TrainSequence], layers: int, experts: int, k: int, seed: int = 0
) -> tuple[TrainSequence, ...]:
    """The same sequences, each token of which passed through k experts drawn at random; those of a prompt that
    neighbours share are the same."""
    rng = np.random.default_rng(seed)
    prompts: dict[bytes, Experts] = {}
    found = []
    for sequence in sequences:
        draws = rng.random((len(sequence.token_ids) - 1, layers, experts)).argsort(-1)[..., :k].astype(np.uint8)
        shared = sequence.num_prompt_tokens - 1
        prompt = prompts.setdefault(sequence.shared_prompt.tobytes(), draws[:shared])
        found.append(dataclasses.replace(sequence, prompt_experts=prompt, experts=draws[shared:]))
    return tuple(found)


def plain_mixture(directory: Path, sequences: Sequence[TrainSequence], dtype: torch.dtype) -> PreTrainedModel:
    """The model of the files, which computes these sequences, and no others, with the experts that they bring."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    under_way: dict[str, np.ndarray] = {}
    chosen = {}
    for sequence in sequences:
        last = np.arange(sequence.experts.shape[-1])  # of the last token, which predicts nothing
        rows = [sequence.prompt_experts, sequence.experts, np.broadcast_to(last, sequence.experts[:1].shape)]
        chosen[sequence.token_ids.astype(np.int64).tobytes()] = np.concatenate(rows)

    def note(module: Any, args: Any) -> None:
        under_way["experts"] = chosen[args[0].numpy().tobytes()]

    model.register_forward_pre_hook(note)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.forward = partial(_mixture, layer.mlp, model.config, under_way, index)
    return model


def _mixture(mlp: Any, config: Any, under_way: dict[str, np.ndarray], index: int, hidden: Tensor) -> Tensor:
    rows = []
    for h, experts in zip(hidden[0], under_way["experts"][:, index], strict=True):
        exponentials = (mlp.gate.weight @ h).exp()
        shares = exponentials[experts.tolist()] / exponentials.sum()
        if config.model_type == "mixtral" or config.norm_topk_prob:
            shares = shares / shares.sum()
        out = torch.zeros_like(h)
        for share, expert in zip(shares, experts, strict=True):
            gate, up = (mlp.experts.gate_up_proj[expert] @ h).chunk(2)
            out = out + share * (mlp.experts.down_proj[expert] @ (gate * gate.sigmoid() * up))
        if hasattr(mlp, "shared_expert"):
            out = out + mlp.shared_expert_gate(h).sigmoid() * mlp.shared_expert(h)
        rows.append(out)
    return torch.stack(rows)[None]
