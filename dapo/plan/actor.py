"""Computes the memory of one actor rank, phase by phase: configuration and model shape in, terms with arithmetic out.

What FSDP2 holds when: shards of float32 parameters, gradients and Adam moments at all times (on the host with
`actor.offload`); of the unit in work the gathered parameters, and those of the next one on their way; in the backward
pass also the unit's whole gradient, and once more in float32 on its way into the shards. The root (final norm, head,
the embedding where it is tied) stays gathered from the first layer's forward pass to the end of the backward pass.
"""

from dataclasses import dataclass

from dapo.config.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.config.schema import LOGITS_CHUNK_ELEMENTS
from dapo.derived import num_shards, resolve_transport
from dapo.plan.activations import FLOAT32, Activations
from dapo.plan.terms import Phase, Term

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def device_of(cfg: PlannedConfig) -> str:
    """Returns `cuda`, unless the configuration says cpu or only fits one: GPUs have no float32 packed attention."""
    if cfg.trainer.device != "auto":
        return cfg.trainer.device
    return "cpu" if cfg.model.dtype == "float32" else "cuda"


def bucket_term(cfg: PlannedConfig, shape: ModelShape, name: str, count: int) -> Term:
    """Sizes `count` buckets of the weight sync: `weight_sync.bucket_bytes`, unless a parameter or the model decides."""
    element = ELEMENT_BYTES[cfg.model.dtype]
    largest = max(cfg.weight_sync.bucket_bytes, element * shape.embedding_parameters)
    largest = min(largest, element * shape.parameters)
    formula = f"{count} x {largest:,} B (weight_sync.bucket_bytes; at least the largest parameter, at most the model)"
    return Term(name=name, amount=count * largest, formula=formula)


def adapter_parameters(cfg: PlannedConfig, shape: ModelShape) -> int:
    """Counts LoRA's parameters over all layers: rank x (inputs + outputs) for each target."""
    h, i, q, kv = shape.hidden_size, shape.intermediate_size, shape.attention_size, shape.kv_size
    widths = dict(zip(LINEARS, (h + q, h + kv, h + kv, q + h, h + i, h + i, i + h), strict=True))
    chosen = cfg.model.lora.target_modules
    names = LINEARS if "all-linear" in chosen else [name for name in LINEARS if name in chosen]
    return shape.num_layers * cfg.model.lora.rank * sum(widths[name] for name in names)


@dataclass(frozen=True, slots=True)
class ActorMemory:
    """Computes the memory of one rank; ranks differ by a rounding."""

    cfg: PlannedConfig
    shape: ModelShape

    @property
    def element(self) -> int:
        """Returns the bytes of the compute type."""
        return ELEMENT_BYTES[self.cfg.model.dtype]

    @property
    def shards(self) -> int:
        """Counts the ranks that one copy of the parameters is sharded over."""
        return num_shards(self.cfg)

    @property
    def trained(self) -> int:
        """Counts the parameters with a gradient."""
        return adapter_parameters(self.cfg, self.shape) if self.cfg.model.lora.rank else self.shape.parameters

    @property
    def _transport(self) -> str:
        return resolve_transport(self.cfg)

    @property
    def activations(self) -> Activations:
        """Returns the activations per token."""
        return Activations(
            shape=self.shape,
            element=self.element,
            checkpointing=self.cfg.model.gradient_checkpointing,
            cuda=device_of(self.cfg) == "cuda",
            shared_by=self.cfg.actor.ulysses_sequence_parallel_size,
        )

    def state(self) -> tuple[Term, ...]:
        """Lists parameters, gradients and optimizer; a reference model where it lives next to them."""
        trained = "adapters" if self.cfg.model.lora.rank else "parameters"
        terms = [
            self._sharded(f"{trained}, float32", FLOAT32, self.trained),
            self._sharded("gradients, float32", FLOAT32, self.trained),
            self._sharded("optimizer, Adam m and v, float32", 2 * FLOAT32, self.trained),
        ]
        if self.cfg.model.lora.rank:
            terms.append(
                self._sharded(f"frozen parameters, {self.cfg.model.dtype}", self.element, self.shape.parameters)
            )
        elif self._has_reference:
            terms.append(
                self._sharded(f"reference policy, {self.cfg.model.dtype}", self.element, self.shape.parameters)
            )
        return tuple(terms)

    @property
    def _has_reference(self) -> bool:
        """Says whether there is a second model; with LoRA the reference is the first one without its adapters."""
        kl = self.cfg.algorithm.kl
        return bool(kl.loss_coeff or kl.reward_coeff)

    def _sharded(self, name: str, width: int, count: int) -> Term:
        formula = f"{width} B x {count:,} / {self.shards} ranks"
        return Term(name=name, amount=width * count / self.shards, formula=formula)

    def offloaded(self) -> tuple[Term, ...]:
        """Returns the part of `state` in host memory. On CPU nothing moves."""
        if device_of(self.cfg) == "cpu":
            return ()
        terms = self.state()
        return terms if self.cfg.actor.offload else tuple(t for t in terms if t.name.startswith("reference"))

    def resident(self) -> tuple[Term, ...]:
        """Returns the part of `state` that stays on the device, and what the process itself takes."""
        elsewhere = {term.name for term in self.offloaded()}
        slots = 2 if self._transport in ("broadcast", "ipc") else 0
        overhead = Term(
            name="process overhead", amount=self.cfg.plan.overhead_bytes, formula="assumed: plan.overhead_bytes"
        )
        buckets = bucket_term(self.cfg, self.shape, f"slots of the weight sync ({self._transport})", slots)
        return (*(term for term in self.state() if term.name not in elsewhere), buckets, overhead)

    def phases(self) -> tuple[Phase, ...]:
        """Lists the phases in the order of a step. Forward passes without gradient and the optimizer's own step hold
        less than these."""
        return (
            Phase(name="head: log-probabilities and their gradient", terms=(*self.resident(), *self._at_head())),
            Phase(name="backward pass of a layer", terms=(*self.resident(), *self._in_layers())),
            Phase(name="end of the backward pass", terms=(*self.resident(), *self._at_end())),
            Phase(name="weight sync", terms=(*self.resident(), *self._in_sync())),
        )

    def peak(self) -> Phase:
        """Returns the phase that needs most."""
        return max(self.phases(), key=lambda phase: phase.total)

    def _root(self) -> Term:
        count = self.shape.embedding_parameters + self.shape.hidden_size
        return Term(
            name="head and final norm gathered",
            amount=self.element * count,
            formula=f"{self.element} B x ({self.shape.vocab_size:,} x {self.shape.hidden_size:,} + norm)",
        )

    def _gathered(self, units: int) -> Term:
        """Returns the layers whose parameters are whole: `units` of them, where they are freed after use."""
        count = units if self.cfg.actor.reshard_after_forward else self.shape.num_layers
        return Term(
            name=f"{count} layer{'s' if count > 1 else ''} gathered",
            amount=self.element * count * self.shape.layer_parameters,
            formula=f"{self.element} B x {count} x {self.shape.layer_parameters:,}",
        )

    def _waiting_gradients(self) -> Term:
        """Returns the whole gradients that wait for the last micro-batch, where parameters stay gathered."""
        count = 0 if self.cfg.actor.reshard_after_forward else min(self.trained, self.shape.parameters)
        return Term(name="whole gradients, float32", amount=FLOAT32 * count, formula=f"{FLOAT32} B x {count:,}")

    def _at_head(self) -> tuple[Term, ...]:
        tokens, element, shape = self.cfg.actor.max_tokens_per_gpu, self.element, self.shape
        elements = LOGITS_CHUNK_ELEMENTS[device_of(self.cfg)]
        rows = -(-tokens // -(-tokens * shape.vocab_size // elements))
        buffers = (element if element != FLOAT32 else 0) + 2 * FLOAT32
        terms = [
            self._root(),
            self._gathered(1),
            self._waiting_gradients(),
            self.activations.term_at_head(tokens),
            Term(
                name="logits chunk and scratch",
                amount=rows * shape.vocab_size * buffers,
                formula=f"{rows:,} tokens x {shape.vocab_size:,} entries x {buffers} B",
            ),
        ]
        if not self.cfg.model.lora.rank:
            width = FLOAT32 + (element if element != FLOAT32 else 0)
            terms.append(
                Term(
                    name="gradient of the head's weight, float32 sum and a chunk's share",
                    amount=width * shape.embedding_parameters,
                    formula=f"{width} B x {shape.vocab_size:,} x {shape.hidden_size:,}",
                )
            )
        return tuple(terms)

    def _in_layers(self) -> tuple[Term, ...]:
        own = self.trained // self.shape.num_layers if self.cfg.model.lora.rank else self.shape.layer_parameters
        width = self.element + FLOAT32
        terms = [
            self._root(),
            self._gathered(2),
            self._waiting_gradients(),
            *self.activations.terms_of_layers(self.cfg.actor.max_tokens_per_gpu),
            Term(
                name="a layer's gradient, and one on its way in float32",
                amount=width * own,
                formula=f"({self.element} + {FLOAT32}) B x {own:,}",
            ),
        ]
        if not self.cfg.model.lora.rank:
            terms.append(self._table_gradients("gradient of the head", 1))
        return tuple(terms)

    def _table_gradients(self, name: str, tables: int) -> Term:
        rows, width = self.shape.vocab_size, self.shape.hidden_size
        amount = self.element * tables * self.shape.embedding_parameters
        return Term(name=name, amount=amount, formula=f"{self.element} B x {tables} x {rows:,} x {width:,}")

    def _at_end(self) -> tuple[Term, ...]:
        """Returns what the end holds: the gradients of embedding and head go into the shards last, one after the
        other.
        """
        terms = [self._root(), self._gathered(1), self._waiting_gradients()]
        if not self.cfg.model.lora.rank:
            tables = 1 if self.shape.tie_word_embeddings else 2
            count = self.shape.embedding_parameters
            terms += [
                self._table_gradients("gradients of embedding and head", tables),
                Term(name="one on its way in float32", amount=FLOAT32 * count, formula=f"{FLOAT32} B x {count:,}"),
            ]
        return tuple(terms)

    def _in_sync(self) -> tuple[Term, ...]:
        largest, width = self.shape.embedding_parameters, FLOAT32 + self.element % FLOAT32
        return (
            Term(
                name="one parameter gathered, in float32 and in the type it travels in",
                amount=width * largest,
                formula=f"{width} B x {self.shape.vocab_size:,} x {self.shape.hidden_size:,} (embedding)",
            ),
        )
