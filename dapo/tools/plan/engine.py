"""Memory of one vLLM engine: weights, KV cache and sequences.

vLLM takes `gpu_memory_utilization` of the GPU, subtracts weights and the peak of a trial batch, and divides the rest
into blocks of KV cache. A CPU engine uses a given cache size (`workers.placement`: 1 GiB by default).
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapo.config.derived import device_of, gpus_per_engine, resolve_transport
from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.config.rules.engine import GPU_MEMORY_UTILIZATION, MAX_NUM_BATCHED_TOKENS
from dapo.tools.plan.actor import ELEMENT_BYTES, bucket_term, copies_term
from dapo.tools.plan.terms import Term, together

# vLLM 0.32: defaults of an embedded engine (usage context ENGINE_CONTEXT).
MAX_NUM_SEQS = 128
BLOCK_TOKENS = {"cuda": 16, "cpu": 128}
VOCABULARY_MULTIPLE = 64  # embedding and head are padded to a multiple of it
KV_BYTES = {"auto": 0, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2}
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of one GPU of one engine. Its `dtype` and `kv_cache_dtype` must be known to `dapo.plan`."""

    cfg: PlannedConfig
    shape: ModelShape

    def _arg(self, name: str, default: Any) -> Any:
        value = self.cfg.rollout.vllm.get(name)
        return default if value is None else value

    @property
    def tensor_parallel(self) -> int:
        return int(self._arg("tensor_parallel_size", 1))

    @property
    def gpus(self) -> int:
        return gpus_per_engine(self.cfg.rollout.vllm)

    @property
    def sharing(self) -> int:
        """Engines on one GPU."""
        return self.cfg.rollout.engines_per_gpu if device_of(self.cfg) == "cuda" else 1

    @property
    def utilization(self) -> float:
        return float(self._arg("gpu_memory_utilization", GPU_MEMORY_UTILIZATION))

    @property
    def window(self) -> int:
        return int(self._arg("max_model_len", self.cfg.data.max_prompt_length + self.cfg.data.max_response_length))

    @property
    def max_num_seqs(self) -> int:
        return int(self._arg("max_num_seqs", MAX_NUM_SEQS))

    @property
    def cache_bytes(self) -> int:
        """The size that is given for the KV cache, with which vLLM ignores `gpu_memory_utilization`; else 0."""
        return int(self._arg("kv_cache_memory_bytes", 0))

    @property
    def max_num_batched_tokens(self) -> int:
        return int(self._arg("max_num_batched_tokens", MAX_NUM_BATCHED_TOKENS))

    @property
    def block(self) -> int:
        return int(self._arg("block_size", BLOCK_TOKENS[device_of(self.cfg)]))

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self._arg("dtype", self.cfg.model.dtype)]

    @property
    def kv_factors(self) -> tuple[int, int, int, int]:
        """Layers and key-value heads of one GPU, head dimension, bytes of an element."""
        layers = self.shape.num_layers // int(self._arg("pipeline_parallel_size", 1))
        heads = max(1, self.shape.num_kv_heads // self.tensor_parallel)
        return layers, heads, self.shape.head_dim, KV_BYTES[self._arg("kv_cache_dtype", "auto")] or self.element

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * math.prod(self.kv_factors)

    def weights(self) -> Term:
        """Weights of one GPU: everything is split, and the vocabulary padded."""
        padding = -self.shape.vocab_size % VOCABULARY_MULTIPLE * self.shape.hidden_size
        count = self.shape.parameters + padding * (1 if self.shape.tie_word_embeddings else 2)
        formula = f"{self.element} B x {count:,} / {self.gpus} GPUs"
        return Term(name=f"weights, {self.cfg.model.dtype}", amount=self.element * count / self.gpus, formula=formula)

    def working(self) -> Term:
        """Peak of vLLM's trial batch: MLP, residual stream, expert outputs, three copies of all logits."""
        tokens, h = self.max_num_batched_tokens, self.shape.hidden_size
        mlp = 3 * self.shape.mlp_width // self.tensor_parallel + self.shape.experts_per_token * h
        logits = 3 * 4 * self.max_num_seqs * self.shape.vocab_size
        formula = (
            f"{tokens:,} tokens x {self.element} B x ({mlp:,} + 4 x {h:,}) + 3 x 4 B x {self.max_num_seqs} sequences x "
            f"{self.shape.vocab_size:,} logits"
        )
        amount = tokens * self.element * (mlp + 4 * h) + logits
        return Term(name="working memory of a batch", amount=amount, formula=formula)

    def terms(self) -> tuple[Term, ...]:
        """All memory of one GPU. The KV cache is last: what is left, negative if nothing is."""
        used = (self.weights(), self.working(), self.asleep())
        if self.cache_bytes:
            cache, formula = float(self.cache_bytes), "rollout.vllm.kv_cache_memory_bytes"
        elif device_of(self.cfg) == "cpu":
            cache, formula = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB, "VLLM_CPU_KVCACHE_SPACE"
        else:
            cache = self.utilization * self.cfg.plan.gpu_memory_bytes - together(used)
            formula = f"{self.utilization:g} x {self.cfg.plan.gpu_memory_bytes:,.0f} B less the rest"
        return (*used, Term(name="KV cache", amount=cache, formula=formula))

    @property
    def taken(self) -> float:
        return max(0.0, together(self.terms()))

    def asleep(self) -> Term:
        """What a sleeping engine keeps: its process, kernels and CUDA graphs."""
        overhead = self.cfg.plan.engine_overhead_bytes
        return Term(name="process, CUDA graphs", amount=overhead, formula="assumed: plan.engine_overhead_bytes")

    def beyond(self) -> tuple[Term, ...]:
        """Memory beyond the engine's share while weights are broadcast to it: the receive buffer, and copies of the
        largest parameter. If weights come from a rank on the same GPU, they count in the rank's memory."""
        if resolve_transport(self.cfg) != "broadcast":
            return ()
        return bucket_term(self.cfg, self.shape, "arriving weights", 1), copies_term(self.cfg, self.shape)

    @property
    def kv_tokens(self) -> int:
        """Tokens that one engine's cache holds, in whole blocks."""
        return max(0, int(self.terms()[-1].amount) // (self.kv_bytes_per_token * self.block)) * self.block

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest sequence, in whole blocks."""
        return -(-self.window // self.block) * self.block

    @property
    def sequence_bytes(self) -> int:
        return self.sequence_tokens * self.kv_bytes_per_token

    @property
    def at_full_length(self) -> float:
        """Number of longest sequences that the cache holds."""
        return self.kv_tokens / self.sequence_tokens

    @staticmethod
    def held(prompt: int, responses: Sequence[int]) -> float:
        """Mean tokens of a growing sequence; longer ones are present for longer (`workers.capacity`)."""
        return sum(r * (prompt + r / 2) for r in responses) / sum(responses)

    def at_lengths(self, prompt: int, responses: Sequence[int]) -> float:
        """Number of growing sequences that the cache holds."""
        return self.kv_tokens / (self.held(prompt, responses) + self.block / 2)

    def running(self, prompt: int, responses: Sequence[int]) -> int:
        return max(1, min(self.max_num_seqs, int(self.at_lengths(prompt, responses))))
