"""Memory of one actor rank, phase by phase, as terms with their arithmetic.

What FSDP2 holds when: shards of float32 parameters, gradients and Adam moments at all times (on the host with
`actor.offload=host`; with `phase` only the moments, while engines generate). For the current unit the gathered
parameters, and those of the next unit in transit. In the backward pass also the unit's whole gradient, and a float32
copy of it on the way into the shards. The root (final norm, head, and the embedding if tied) stays gathered from the
first layer's forward pass to the end of the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dapo.config.derived import LENT_TRANSPORT, device_of, lends, num_shards, resolve_transport
from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.config.schema import LOGITS_CHUNK_ELEMENTS
from dapo.tools.plan.terms import Phase, Term, product, together

FLOAT32, INT64 = 4, 8
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CANARY_TOKENS = 16  # `workers.rollout`
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Activation bytes per token that a rank keeps for the backward pass, from the operations of transformers' layers.
    tests/tools/plan/test_memory.py measures the same. element: bytes of the compute type. cuda: on CPU key-value heads
    are repeated per query head. shared_by: `actor.ulysses_sequence_parallel_size`."""

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
        return (
            product(f"activations kept by {others} layers", others * self.kept + self.once, tokens),
            product("activations of the layer in work", self.working_layer, tokens),
        )

    def term_at_head(self, tokens: int) -> Term:
        """Memory while the head computes: layers, final norm, hidden states selected for the head."""
        layers, picked = self.shape.num_layers, self.once + self.norm + 2 * self.input
        return product(f"activations kept by {layers} layers", layers * self.kept + picked, tokens)


def bucket_term(cfg: PlannedConfig, shape: ModelShape, name: str, count: int) -> Term:
    """`weight_sync.bucket_bytes` per bucket, at least the largest parameter and at most the model."""
    element = ELEMENT_BYTES[cfg.model.dtype]
    largest = max(cfg.weight_sync.bucket_bytes, element * shape.embedding_parameters)  # experts are sent one by one
    return product(name, min(largest, element * shape.parameters), count)


def copies_term(cfg: PlannedConfig, shape: ModelShape) -> Term:
    """Memory of an engine, beside its KV cache, while it loads the largest parameter or a layer's experts: a copy, and
    the part that vLLM loads before copying it into place."""
    element = ELEMENT_BYTES[cfg.rollout.vllm.get("dtype", cfg.model.dtype)]
    parts, table = int(cfg.rollout.vllm.get("tensor_parallel_size", 1)), shape.loaded_at_once
    formula = f"{element} B x {table:,} x (1 + 1 / {parts})"
    return Term(name="a parameter on its way into its place", amount=element * table * (1 + 1 / parts), formula=formula)


def adapter_parameters(cfg: PlannedConfig, shape: ModelShape) -> int:
    """LoRA parameters over all layers: rank x (inputs + outputs) for each target. Experts have no adapters."""
    h, i, q, kv = shape.hidden_size, shape.intermediate_size, shape.attention_size, shape.kv_size
    widths = dict(zip(LINEARS, (h + q, h + kv, h + kv, q + h, h + i, h + i, i + h), strict=True))
    chosen = cfg.model.lora.target_modules
    linears = LINEARS[:4] if shape.experts else LINEARS
    names = linears if "all-linear" in chosen else [name for name in linears if name in chosen]
    return shape.num_layers * cfg.model.lora.rank * sum(widths[name] for name in names)


@dataclass(frozen=True, slots=True)
class ActorMemory:
    """Memory of one rank; ranks differ only by rounding."""

    cfg: PlannedConfig
    shape: ModelShape

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.cfg.model.dtype]

    @property
    def shards(self) -> int:
        return num_shards(self.cfg)

    @property
    def trained(self) -> int:
        return adapter_parameters(self.cfg, self.shape) if self.cfg.model.lora.rank else self.shape.parameters

    @property
    def activations(self) -> Activations:
        return Activations(
            shape=self.shape,
            element=self.element,
            checkpointing=self.cfg.model.gradient_checkpointing,
            cuda=device_of(self.cfg) == "cuda",
            shared_by=self.cfg.actor.ulysses_sequence_parallel_size,
        )

    def state(self) -> tuple[Term, ...]:
        """Parameters, gradients, optimizer, reference model if any. With LoRA the frozen base is the reference."""
        lora, kl = self.cfg.model.lora.rank, self.cfg.algorithm.kl
        terms = [
            self._sharded(f"{'adapters' if lora else 'parameters'}, float32", FLOAT32, self.trained),
            self._sharded("gradients, float32", FLOAT32, self.trained),
            self._sharded("optimizer, Adam m and v, float32", 2 * FLOAT32, self.trained),
        ]
        if lora or kl.loss_coeff or kl.reward_coeff:
            name = f"{'frozen parameters' if lora else 'reference policy'}, {self.cfg.model.dtype}"
            terms.append(self._sharded(name, self.element, self.shape.parameters))
        return tuple(terms)

    def _sharded(self, name: str, width: int, count: int) -> Term:
        formula = f"{width} B x {count:,} / {self.shards} ranks"
        return Term(name=name, amount=width * count / self.shards, formula=formula)

    def offloaded(self) -> tuple[Term, ...]:
        """Part of `state` in host memory; none on CPU."""
        if device_of(self.cfg) == "cpu":
            return ()
        terms = self.state()
        return terms if self.cfg.actor.offload == "host" else tuple(t for t in terms if t.name.startswith("reference"))

    def moved(self) -> tuple[Term, ...]:
        """Part of `state` that is in host memory while engines have the GPU."""
        if device_of(self.cfg) == "cpu" or self.cfg.actor.offload != "phase":
            return ()
        return tuple(term for term in self.state() if term.name.startswith("optimizer"))

    def beside(self) -> Phase:
        """Peak memory of a rank on its GPU while an awake engine has it. The rank then computes the tokens that an
        engine is compared by, and gathers weights: for an export, or for an engine that restarts, whose copies do not
        count in its share. Gradients exist only in an update."""
        gone = {term.name for term in self.moved()}
        resting = [t for t in self.resident() if t.name not in gone and not t.name.startswith("gradients")]
        compared = (*self._arriving(), self._in_forward())
        gathered = (self._in_sync(), copies_term(self.cfg, self.shape))
        return max(
            Phase(name="comparing log-probabilities with an engine", terms=(*resting, *compared)),
            Phase(name="gathering weights", terms=(*resting, *gathered)),
            key=lambda phase: phase.total,
        )

    def _arriving(self) -> tuple[Term, ...]:
        """Unsharded memory in a forward pass without gradient: the root and the units after it. Each unit has its
        parameters and the receive buffer, which is kept until the next unit's is there."""
        shape, element = self.shape, self.element
        root, layers, _ = self._gathered(1)
        table, layer = shape.embedding_parameters, shape.layer_parameters
        first = table + layer if shape.tie_word_embeddings else 2 * table  # the root or the embedding is in transit too
        after = layers.amount // element + 2 * layer
        name = "embedding or layers gathered, as they arrive and whole"
        return root, product(name, element, max(first, round(after)))

    def _in_forward(self) -> Term:
        tokens = -(-(self.cfg.data.max_prompt_length + CANARY_TOKENS) // self.cfg.actor.ulysses_sequence_parallel_size)
        return product("a layer's activations", self.activations.layer, tokens)

    def checkpoint(self) -> tuple[Term, ...]:
        """Bytes of one checkpoint on disk, without buffer, cursor and tokenizer, which are negligible."""
        if self.cfg.trainer.only == "rollout":
            return ()
        state = product("parameters and Adam m, v, float32", 12, self.trained)
        export = product(f"Hugging Face export, {self.cfg.model.dtype}", self.element, self.shape.parameters)
        return (state, export) if self.cfg.checkpoint.hf_export else (state,)

    def copied(self) -> tuple[Term, ...]:
        """Host memory for an asynchronous checkpoint: first the share of each rank, then what only rank 0 holds."""
        if not self.cfg.checkpoint.async_save:
            return ()
        own = self._sharded("copy of parameters and Adam m, v, float32", 3 * FLOAT32, self.trained)
        export = product(f"copy of the export, {self.cfg.model.dtype}, rank 0", self.element, self.shape.parameters)
        return (own, export) if self.cfg.checkpoint.hf_export else (own,)

    def kept(self) -> tuple[Term, ...]:
        """Host memory of each rank's copies for lost ranks: those of a step stay until the next ones are whole."""
        if not (copies := 2 * self.cfg.checkpoint.memory_copies):
            return ()
        return (self._sharded(f"{copies} x parameters and Adam m, v, float32", copies * 3 * FLOAT32, self.trained),)

    def on_host(self) -> float:
        """Bytes of host memory that the ranks of one node use, for the node of rank 0."""
        ranks = min(self.cfg.plan.gpus_per_node, self.cfg.actor.num_workers)
        own, *alone = [term.amount for term in self.copied()] or [0.0]
        return ranks * (own + together((*self.offloaded(), *self.moved(), *self.kept()))) + sum(alone)

    def resident(self) -> tuple[Term, ...]:
        elsewhere = {term.name for term in self.offloaded()}
        transports, overhead = [resolve_transport(self.cfg)], self.cfg.plan.overhead_bytes
        transports += [LENT_TRANSPORT] if lends(self.cfg) else []
        name = f"slots of the weight sync ({', '.join(transports)})"
        return (
            *(term for term in self.state() if term.name not in elsewhere),
            bucket_term(self.cfg, self.shape, name, 2 * len(transports)),
            Term(name="process overhead", amount=overhead, formula="assumed: plan.overhead_bytes"),
        )

    def phases(self) -> tuple[Phase, ...]:
        """The phases in the order of a step. Passes without gradient and the optimizer's step need less than these."""
        resident = self.resident()
        own = {
            "head: log-probabilities and their gradient": (*self._gathered(1), *self._at_head()),
            "backward pass of a layer": (*self._gathered(2), *self._in_layers()),
            "end of the backward pass": (*self._gathered(1), *self._at_end()),
            "weight sync": (self._in_sync(),),
        }
        return tuple(Phase(name=name, terms=(*resident, *terms)) for name, terms in own.items())

    def peak(self) -> Phase:
        return max(self.phases(), key=lambda phase: phase.total)

    def _gathered(self, units: int) -> tuple[Term, ...]:
        """Unsharded: the root, and `units` layers; without resharding all layers and their waiting gradients."""
        shape, element, freed = self.shape, self.element, self.cfg.actor.reshard_after_forward
        count = units if freed else shape.num_layers
        root = product("head and final norm gathered", element, shape.embedding_parameters + shape.hidden_size)
        layers = product(f"{count} layer{'s' if count > 1 else ''} gathered", element, count, shape.layer_parameters)
        waiting = 0 if freed else min(self.trained, shape.parameters)
        return root, layers, product("whole gradients, float32", FLOAT32, waiting)

    def _at_head(self) -> Iterator[Term]:
        tokens, shape = self.cfg.actor.max_tokens_per_gpu, self.shape
        narrow = self.element if self.element != FLOAT32 else 0
        buffers = narrow + 2 * FLOAT32
        rows = -(-tokens // -(-tokens * shape.vocab_size // LOGITS_CHUNK_ELEMENTS[device_of(self.cfg)]))
        yield self.activations.term_at_head(tokens)
        yield product("logits chunk and scratch", buffers, rows, shape.vocab_size)
        if narrow and self.cfg.model.head_dtype == "float32" and device_of(self.cfg) == "cpu":
            yield product("the head's weight in float32", FLOAT32, shape.vocab_size, shape.hidden_size)
        if not self.cfg.model.lora.rank:
            name = "gradient of the head's weight, float32 sum and a chunk's share"
            yield product(name, FLOAT32 + narrow, shape.vocab_size, shape.hidden_size)

    def _in_layers(self) -> Iterator[Term]:
        lora, shape = self.cfg.model.lora.rank, self.shape
        own = self.trained // shape.num_layers if lora else shape.layer_parameters
        yield from self.activations.terms_of_layers(self.cfg.actor.max_tokens_per_gpu)
        yield product("a layer's gradient, and one on its way in float32", self.element + FLOAT32, own)
        if not lora:
            yield product("gradient of the head", self.element, 1, shape.vocab_size, shape.hidden_size)

    def _at_end(self) -> Iterator[Term]:
        """Memory at the end: the gradients of embedding and head go into the shards last, one after the other."""
        shape = self.shape
        if not self.cfg.model.lora.rank:
            tables = 1 if shape.tie_word_embeddings else 2
            yield product("gradients of embedding and head", self.element, tables, shape.vocab_size, shape.hidden_size)
            yield product("one on its way in float32", FLOAT32, shape.embedding_parameters)

    def _in_sync(self) -> Term:
        """The largest parameter in `workers.training.fsdp.gather`: converted before it is sent, then as it arrives
        shard by shard, and whole. With LoRA it stays float32, because adapters are merged into it."""
        width = FLOAT32 if self.cfg.model.lora.rank else self.element
        return product("one parameter gathered, in shards and whole", 2 * width, self.shape.largest_parameter)
