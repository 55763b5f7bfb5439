"""Activation checkpointing per decoder layer (`model.gradient_checkpointing`): in training mode a layer keeps for the
backward pass only its inputs (`full`), also what is expensive to compute (`selective`), or everything (`none`)."""

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::linear"})
ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::_flash_attn_forward",
    }
)


def checkpoint_activations(model: PreTrainedModel, mode: str) -> None:
    """Enables it in place. mode: one of `dapo.config.schema.GRADIENT_CHECKPOINTING`."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a layer is random
    if mode == "selective":
        options["context_fn"] = _keep_expensive
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _keep_expensive() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Keeps attention and every second matrix product of one layer in one forward pass. In a Qwen2 or Llama layer these
    are the projections k, o and up; q, v and gate are recomputed, and down is not, as no gradient needs it."""
    products = {True: 0, False: 0}  # separate counts: recomputation has the same order

    def policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name().partition(".")[0]
        if name in MATRIX_PRODUCTS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 0
        else:
            keep = name in ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts
