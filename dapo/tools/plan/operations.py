"""Seconds of GPUs in a forward and a backward pass, counted by operation: FLOPs of matrices and attention, and bytes
that all else reads and writes, at the shares of a card's peak that `plan` assumes.

Bytes are those of the operations that run on two-byte activations: transformers' layers (RMS norms in float32, rotary
embedding, gated MLP), logits chunks (`workers.training.forward.logprobs`), FSDP2 and AdamW. What torch.compile fuses
reads and writes each tensor once. tests/tools/plan/test_step.py compares the sum with six measured updates.
"""

import math
from dataclasses import dataclass

from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import ATTENTION, PlannedConfig
from dapo.config.schema import LOGITS_CHUNK_ELEMENTS

# Multiples of the forward pass. Without weight gradients half as much; attention computes its scores once more.
BACKWARD, FROZEN_BACKWARD, ATTENTION_BACKWARD, ELEMENTWISE_BACKWARD = 2.0, 1.0, 2.5, 2.2
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
    def layers(self) -> float:
        """FLOPs of the layers' matrices in a forward pass."""
        return 2.0 * self.shape.num_layers * self.shape.layer_matrices * self.tokens

    @property
    def head(self) -> float:
        return float(self.shape.head_flops * self.responses)

    @property
    def forward_flops(self) -> float:
        return self.layers + self.head + self.attention

    @property
    def backward(self) -> float:
        """Multiple of the forward pass of matrices. With LoRA the frozen weights need no gradient."""
        return FROZEN_BACKWARD if self.cfg.model.lora.rank else BACKWARD

    @property
    def recomputed(self) -> tuple[float, float]:
        """Shares of the forward pass of the layers' matrices, and of attention, that the backward pass recomputes: all
        but `down`, whose output is needed only for a router's gradient. The head is always computed again."""
        shape, mode = self.shape, self.cfg.model.gradient_checkpointing
        h = shape.hidden_size
        wide = 0 if shape.experts else h * shape.intermediate_size  # up or down
        whole = shape.layer_matrices - wide
        kept = h * (shape.attention_size + shape.kv_size) + wide  # selective: k, o and up
        products = {"full": whole, "selective": whole - kept, "none": 0}[mode]
        return products / shape.layer_matrices, 1.0 if mode == "full" else 0.0

    @property
    def backward_flops(self) -> float:
        again, attention_again = self.recomputed
        matrices = self.layers * (self.backward + again) + self.head * (self.backward + 1)
        return matrices + self.attention * (ATTENTION_BACKWARD + attention_again)

    def forward_s(self) -> dict[str, float]:
        """GPU seconds by kind of work."""
        forward, _ = ATTENTION_SHARES[attention_of(self.cfg)]
        return {
            "matrices": self._multiplying(self.layers),
            "attention": self.attention / (forward * self.cfg.plan.gpu_flops),
            "elementwise": moving_s(self.cfg, self._elementwise),
            "head": self._multiplying(self.head) + moving_s(self.cfg, self._logits[0]),
        }

    def backward_s(self) -> dict[str, float]:
        forward, backward = (share * self.cfg.plan.gpu_flops for share in ATTENTION_SHARES[attention_of(self.cfg)])
        again, attention_again = self.recomputed
        once_more = 0.0 if self.cfg.model.gradient_checkpointing == "none" else 1.0
        logits = self._logits[1] + (0.0 if self.cfg.model.lora.rank else self._gradient_of_head)
        return {
            "matrices": self._multiplying(self.layers * (self.backward + again)),
            "attention": self.attention * (ATTENTION_BACKWARD / backward + attention_again / forward),
            "elementwise": moving_s(self.cfg, self._elementwise * (ELEMENTWISE_BACKWARD + once_more)),
            "head": self._multiplying(self.head * (self.backward + 1)) + moving_s(self.cfg, logits),
        }

    def _multiplying(self, flops: float) -> float:
        return flops / (self.cfg.plan.matrix_share * self.cfg.plan.gpu_flops)

    @property
    def _elementwise(self) -> float:
        """Bytes of the layers in a forward pass: norms and residuals, rotation, gate times up, experts' rows."""
        shape = self.shape
        h, rotated, i = shape.hidden_size, shape.attention_size + shape.kv_size, shape.mlp_width
        rows = shape.experts_per_token * h
        if self.cfg.actor.compile:
            width = 16 * h + 4 * rotated + 6 * i + 8 * rows
        else:
            width = 84 * h + (56 if shape.qk_norm else 20) * rotated + 10 * i + 12 * rows
        return width * shape.num_layers * self.tokens

    @property
    def _logits(self) -> tuple[float, float]:
        """Bytes of all logits in a forward pass and in a backward pass."""
        forward, backward = LOGIT[self.cfg.actor.compile, self.cfg.model.head_dtype == "float32"]
        count = self.shape.vocab_size * self.responses
        return forward * count, backward * count

    @property
    def _gradient_of_head(self) -> float:
        elements = self.responses / self.micro_batches * self.shape.vocab_size
        chunks = self.micro_batches * math.ceil(elements / LOGITS_CHUNK_ELEMENTS["cuda"])
        return float(GRADIENT_OF_HEAD * self.shape.embedding_parameters * chunks)
