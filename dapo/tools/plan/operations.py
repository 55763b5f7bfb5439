"""Seconds of GPUs in a forward and a backward pass, counted by operation: FLOPs of matrices and attention, and bytes
that all else reads and writes, at the shares of a card's peak that `plan` assumes.

Bytes are those of the operations that run on two-byte activations: transformers' layers (RMS norms in float32, rotary
embedding, gated MLP), logits chunks (`workers.training.forward.logprobs`), FSDP2 and AdamW. What torch.compile fuses
reads and writes each tensor once. tests/tools/plan/test_step.py compares the sum with six measured updates.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import ATTENTION, PlannedConfig
from dapo.config.schema import LOGITS_CHUNK_ELEMENTS

# Shares of a Hopper's peak that FlashAttention reaches on long sequences, forward and backward.
ATTENTION_SHARES = {"fa2": (0.36, 0.29), "fa3": (0.58, 0.48)}
# Bytes per logit in a forward pass, and in a backward pass that computes the chunk again: by (`actor.compile`, whether
# `model.head_dtype` is float32).
LOGIT = {(False, False): (48, 38), (False, True): (44, 34), (True, False): (8, 6), (True, True): (16, 18)}
GRADIENT_OF_HEAD = 12  # bytes per element and chunk: a product, added to a float32 sum
OPTIMIZER = 36  # bytes per trained element: norm, clipping, AdamW
# Multiples of `plan.layer_s`: with torch.compile FSDP's hooks remain; selective checkpointing sees each operation.
COMPILED_LAUNCH, SELECTIVE_LAUNCH = 0.4, 2.0


def attention_of(cfg: PlannedConfig) -> str:
    name = cfg.model.attn_implementation
    return name if name in ATTENTION else cfg.plan.attention


def moving_s(cfg: PlannedConfig, num_bytes: float) -> float:
    """Seconds in which a GPU reads and writes so many bytes of its memory."""
    return num_bytes / (cfg.plan.memory_share * cfg.plan.gpu_bandwidth)


def launch_s(cfg: PlannedConfig, shape: ModelShape) -> tuple[float, float, float]:
    """Seconds of the host to launch the layers of one micro-batch: without gradient, forward, backward."""
    plain = shape.num_layers * cfg.plan.layer_s * (COMPILED_LAUNCH if cfg.actor.compile else 1.0)
    mode = cfg.model.gradient_checkpointing
    forward = plain * (SELECTIVE_LAUNCH if mode == "selective" and not cfg.actor.compile else 1.0)
    return plain, forward, plain + (0.0 if mode == "none" else forward)


def fsdp_bytes(cfg: PlannedConfig, parameters: int, trained: int, shards: int) -> tuple[float, float, float]:
    """Bytes that a GPU reads and writes to gather all units (cast, receive, copy out), to reduce their gradients (copy
    in, reduce, add to the shards), and to add whole gradients that wait for the last micro-batch."""
    cast = 0 if cfg.model.lora.rank else 6
    return parameters * (6 + (cast + 2) / shards), trained * (10 + 16 / shards), 12.0 * trained


class Pass(NamedTuple):
    """Multiples of a forward pass."""

    layers: float
    head: float
    attention: float
    attention_backward: float
    elementwise: float
    logit_bytes: float  # per logit
    head_bytes: float = 0  # per element of the head's weight and chunk of logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """One epoch over a batch on all ranks. responses: tokens whose logits are needed. attention: FLOPs of a forward
    pass. micro_batches: of all ranks."""

    cfg: PlannedConfig
    shape: ModelShape
    tokens: float
    responses: float
    attention: float
    micro_batches: int

    @property
    def forward(self) -> Pass:
        return Pass(1, 1, 1, 0, 1, self._logit_bytes[0])

    @property
    def backward(self) -> Pass:
        """Without weight gradients (LoRA) matrices cost half as much. All but `down`, whose output is needed only for a
        router's gradient, is computed again (`full`), or all but `down`, k, o, up and attention (`selective`); the head
        always is."""
        shape, mode, lora = self.shape, self.cfg.model.gradient_checkpointing, self.cfg.model.lora.rank > 0
        wide = 0 if shape.experts else shape.hidden_size * shape.intermediate_size  # down, or up
        whole = shape.layer_matrices - wide
        kept = shape.hidden_size * (shape.attention_size + shape.kv_size) + wide
        again = {"full": whole, "selective": whole - kept, "none": 0}[mode] / shape.layer_matrices
        return Pass(
            layers=(1 if lora else 2) + again,
            head=(1 if lora else 2) + 1,
            attention=1 if mode == "full" else 0,
            attention_backward=2.5,  # it computes its scores once more
            elementwise=2.2 + (mode != "none"),
            logit_bytes=self._logit_bytes[1],
            head_bytes=0 if lora else GRADIENT_OF_HEAD,
        )

    @property
    def _logit_bytes(self) -> tuple[int, int]:
        return LOGIT[self.cfg.actor.compile, self.cfg.model.head_dtype == "float32"]

    @property
    def _flops(self) -> tuple[float, float]:
        """Of the layers' matrices and of the head in a forward pass."""
        head = self.shape.head_flops
        return (self.shape.flops_per_token - head) * self.tokens, head * self.responses

    def flops(self, of: Pass) -> float:
        layers, head = self._flops
        return layers * of.layers + head * of.head + self.attention * (of.attention + of.attention_backward)

    def seconds(self, of: Pass) -> dict[str, float]:
        """GPU seconds by kind of work."""
        plan, shape, (layers, head) = self.cfg.plan, self.shape, self._flops
        forward, backward = ATTENTION_SHARES[attention_of(self.cfg)]
        attention = self.attention * (of.attention / forward + of.attention_backward / backward)
        logits = self.responses * shape.vocab_size
        chunks = self.micro_batches * math.ceil(logits / self.micro_batches / LOGITS_CHUNK_ELEMENTS["cuda"])
        at_head = of.logit_bytes * logits + of.head_bytes * chunks * shape.embedding_parameters
        product_s = 1 / (plan.matrix_share * plan.gpu_flops)
        return {
            "matrices": layers * of.layers * product_s,
            "attention": attention / plan.gpu_flops,
            "elementwise": moving_s(self.cfg, self._layer_bytes * of.elementwise * self.tokens),
            "head": head * of.head * product_s + moving_s(self.cfg, at_head),
        }

    @property
    def _layer_bytes(self) -> int:
        """Of a token in all layers, forward: norms and residuals, rotation, gate times up, experts' rows."""
        shape, compiled = self.shape, self.cfg.actor.compile
        rotation = 4 if compiled else 56 if shape.qk_norm else 20
        width = (16 if compiled else 84) * shape.hidden_size + rotation * (shape.attention_size + shape.kv_size)
        width += (6 if compiled else 10) * shape.mlp_width
        width += (8 if compiled else 12) * shape.experts_per_token * shape.hidden_size
        return width * shape.num_layers
