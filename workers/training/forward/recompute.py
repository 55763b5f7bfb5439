"""Activation checkpointing per decoder layer (`model.gradient_checkpointing`): in training mode a layer keeps for the
backward pass only its inputs (`full`), also what is expensive to compute (`selective`), or everything (`none`). And the
layers' compilation (`actor.compile`), which takes checkpointing in."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._dynamo import config as dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dapo.ground.console import warn

MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::linear"})
ATTENTION = frozenset(
    {
        "dapo::segments_on_cpu",
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

RECOMPILE_LIMIT = 64  # graphs of a layer: with a gradient or not, shared prompts, adapters; and kinds of layers


def checkpoint_activations(model: PreTrainedModel, mode: str) -> None:
    """Enables it in place. mode: one of `dapo.config.schema.GRADIENT_CHECKPOINTING`."""
    if mode != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=_options(mode))


class Compiled:
    """Compiles parts of a policy by torch.compile, for any number of tokens and sequences. failure: why they are not
    compiled any more; empty while they are."""

    def __init__(self, backend: str = "inductor") -> None:
        self.failure = ""
        self._backend = backend
        functorch.force_non_lazy_backward_lowering = True  # so that compiling fails in the forward pass or never
        dynamo.recompile_limit = RECOMPILE_LIMIT

    def layers(self, model: PreTrainedModel, mode: str) -> None:
        """Compiles each decoder layer in place, with its checkpointing inside. mode: as of `checkpoint_activations`,
        which is not called then."""
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                forward: Any = layer.forward
                if mode != "none":
                    forward = partial(checkpoint, forward, **_options(mode))
                layer.forward = self.function(forward)

    def function(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what computes the same, compiled; once compiling has failed, as it is."""
        compiled = torch.compile(plain, dynamic=True, fullgraph=True, backend=self._backend)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.failure:
                try:
                    return compiled(*args, **kwargs)
                except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                    self.failure = " ".join([type(error).__name__, *str(error).splitlines()[:2]])
                    warn(f"torch.compile fails, and this rank goes on without it: {self.failure}")  # to the rank's log
            return plain(*args, **kwargs)

        return call


def _options(mode: str) -> dict[str, Any]:
    keep = {"context_fn": _keep_expensive} if mode == "selective" else {}
    return {"use_reentrant": False, "preserve_rng_state": False, **keep}  # nothing in a layer is random


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
