"""Activation bytes per token that one rank keeps for the backward pass, from the operations of transformers' layers.

Exact for the layers' own tensors: tests/plan/test_memory.py measures the same on CPU in float32 and bfloat16, for each
checkpointing mode. In all formulas h is the hidden size, i the intermediate size, q and kv the widths of queries and of
keys, e the bytes of an element.
"""

from dataclasses import dataclass

from dapo.config.facts.model_shape import ModelShape
from dapo.plan.terms import Term

FLOAT32, INT64 = 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes per token. element: bytes of the compute type. checkpointing: `model.gradient_checkpointing`. cuda: the
    attention kernel uses shared key-value heads directly; on CPU they are repeated per query head. shared_by:
    `actor.ulysses_sequence_parallel_size`."""

    shape: ModelShape
    element: int
    checkpointing: str
    cuda: bool = True
    shared_by: int = 1

    @property
    def norm(self) -> int:
        """An RMS norm in float32: its input, a factor per token, the result before and after the weight."""
        return (FLOAT32 + 2 * self.element) * self.shape.hidden_size + FLOAT32

    @property
    def attention(self) -> int:
        """Queries, keys and values after rotation, the output (twice if it is copied), log-sum-exp per head."""
        queries = self.shape.attention_size
        keys = max(self.shape.num_kv_heads, self.shared_by) * self.shape.head_dim if self.cuda else queries
        copies = 1 if self.cuda and self.shared_by == 1 else 2
        norms = (FLOAT32 + self.element) * (queries + self.shape.kv_size) if self.shape.qk_norm else 0
        return self.element * (queries + 2 * keys + copies * queries) + FLOAT32 * self.shape.num_heads + norms

    @property
    def mlp(self) -> int:
        """Gate, its activation, up and their product. For experts also the input and output of each, and the routing:
        three orders of the (token, expert) pairs, and router shares before and after."""
        shape, pairs = self.shape, self.shape.experts_per_token
        choice = (3 * INT64 + INT64 + 2 * FLOAT32 + self.element) * pairs + FLOAT32 * shape.experts
        chosen = pairs * 2 * self.input + choice if pairs else 0
        return 4 * self.element * shape.mlp_width + chosen

    @property
    def layer(self) -> int:
        return 2 * self.norm + self.attention + self.mlp

    @property
    def input(self) -> int:
        return self.element * self.shape.hidden_size

    @property
    def kept(self) -> int:
        if self.checkpointing == "full":
            return self.input
        if self.checkpointing == "selective":  # keeps attention and the products k, o, up (`forward/recompute.py`)
            up = 0 if self.shape.experts else self.shape.intermediate_size  # grouped products are not kept
            own = self.shape.kv_size + self.shape.hidden_size + up
            attention = self.element * self.shape.attention_size + FLOAT32 * self.shape.num_heads
            return self.input + self.element * own + attention
        return self.layer

    @property
    def once(self) -> int:
        """Cosines and sines, which all layers share."""
        return 2 * self.element * self.shape.head_dim

    @property
    def working_layer(self) -> int:
        """The layer in its backward pass, fully recomputed, with the gradients of gate, up and three of width h."""
        separate = self.input if self.checkpointing != "none" and self.element != FLOAT32 else 0
        widths = 2 * self.shape.mlp_width + (3 + self.shape.experts_per_token) * self.shape.hidden_size
        gradients = self.element * widths
        return self.layer + separate + gradients

    def terms_of_layers(self, tokens: int) -> tuple[Term, Term]:
        """Memory while the last layer is in its backward pass: what the other layers keep, and this layer."""
        others = self.shape.num_layers - 1
        kept = f"({others} x {self.kept:,} B ({self.checkpointing}) + {self.once:,} B)"
        working = f"{self.working_layer:,} B (kept whole {self.layer:,} B, the rest gradients)"
        return (
            _per_token(f"activations kept by {others} layers", tokens, others * self.kept + self.once, kept),
            _per_token("activations of the layer in work", tokens, self.working_layer, working),
        )

    def term_at_head(self, tokens: int) -> Term:
        """Memory while the head computes: layers, final norm, hidden states selected for the head."""
        layers, picked = self.shape.num_layers, self.once + self.norm + 2 * self.input
        formula = f"({layers} x {self.kept:,} B ({self.checkpointing}) + {picked:,} B final norm and picked states)"
        return _per_token(f"activations kept by {layers} layers", tokens, layers * self.kept + picked, formula)


def _per_token(name: str, tokens: int, width: int, formula: str) -> Term:
    return Term(name=name, amount=tokens * width, formula=f"{tokens:,} tokens x {formula}")
