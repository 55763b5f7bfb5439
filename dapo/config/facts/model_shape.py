"""Derives parameters and FLOPs from the shape of a decoder: a model's name in, a `ModelShape` out.

Reads config.json alone: no torch, no network. The shapes of the shipped experiments' models lie in config/models, so
that `dapo.plan` answers on a machine that has none of them.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config.paths import config_dir, resolve_path

# Decoders with gated MLP and grouped-query attention. Of these Qwen2 always has query, key and value biases, and Qwen3
# has a norm of its own on each head's query and key.
DENSE = ("qwen2", "qwen3", "llama", "mistral")
# Mixtures whose layers all have experts and nothing beside them: the keys of an expert's width, and of their number.
EXPERTS = {"qwen3_moe": ("moe_intermediate_size", "num_experts"), "mixtral": ("intermediate_size", "num_local_experts")}
# Where a config.json says how many positions a model has; the least counts.
POSITION_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
# Kinds of rotary scaling whose factor is in `max_position_embeddings` already.
WITHIN_POSITIONS = (None, "default", "su", "longrope", "llama3", "deepseek_llama_scaling")
YARN = ("yarn", "deepseek_yarn")
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class UnknownShape(ValueError):
    """Says that the model has no config.json that can be found, or an architecture that `ModelShape` does not
    describe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Describes a decoder. attention_bias: of the query, key and value projections. qk_norm: RMS norms on the heads'
    queries and keys. intermediate_size: of the MLP, or of each of the `experts` of a mixture, of which a token goes
    through `experts_per_token`."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    experts: int = 0
    experts_per_token: int = 0

    @property
    def attention_size(self) -> int:
        """Returns the width of all heads' queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Returns the width of all heads' keys, and of their values."""
        return self.num_kv_heads * self.head_dim

    @property
    def head_shares(self) -> list[int]:
        """Returns `head_shares` of this model."""
        return head_shares(self.num_heads, self.num_kv_heads)

    @property
    def mlp_width(self) -> int:
        """Returns the width of all that one token goes through in a layer between two projections of its MLPs."""
        return self.intermediate_size * (self.experts_per_token or 1)

    @property
    def layer_matrices(self) -> int:
        """Counts the parameters of one decoder layer that are multiplied with each token, a router's among them."""
        attention = self.hidden_size * (2 * self.attention_size + 2 * self.kv_size)
        return attention + self.hidden_size * (3 * self.mlp_width + self.experts)

    @property
    def layer_parameters(self) -> int:
        """Counts the parameters of one decoder layer: matrices, those of all experts, biases, norms."""
        biases = self.attention_size + 2 * self.kv_size if self.attention_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        others = 3 * self.hidden_size * self.intermediate_size * (self.experts - self.experts_per_token)
        return self.layer_matrices + others + biases + norms

    @property
    def expert_parameters(self) -> int:
        """Counts the parameters of all experts of a layer; 0 where there are none."""
        return 3 * self.hidden_size * self.intermediate_size * self.experts

    @property
    def largest_parameter(self) -> int:
        """Counts the elements of the largest parameter of the actors: the embedding, or a layer's experts' gate and
        up."""
        return max(self.embedding_parameters, self.expert_parameters // 3 * 2)

    @property
    def loaded_at_once(self) -> int:
        """Counts the parameters that an engine loads as one in a weight sync: the embedding, or a layer's experts."""
        return max(self.embedding_parameters, self.expert_parameters)

    @property
    def embedding_parameters(self) -> int:
        """Counts the parameters of the embedding matrix; a head that is not tied has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Counts the parameters outside the decoder layers: embedding, head unless tied, final norm."""
        return self.embedding_parameters * (1 if self.tie_word_embeddings else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        """Counts all parameters, tied ones once."""
        return self.num_layers * self.layer_parameters + self.root_parameters

    @property
    def head_flops(self) -> int:
        """Returns FLOPs of the head for one token, forward."""
        return 2 * self.embedding_parameters

    @property
    def flops_per_token(self) -> int:
        """Returns FLOPs of the matrices for one token, forward, head included: all that does not grow with the
        length."""
        return 2 * self.num_layers * self.layer_matrices + self.head_flops

    def attention_flops(self, length: int) -> float:
        """Counts causal attention of one sequence of `length` tokens, forward: scores and weighted values, half of 4 h
        L^2."""
        return 2.0 * self.num_layers * self.attention_size * length * length

    def forward_flops(self, lengths: Iterable[int], head_tokens: int | None = None) -> float:
        """Returns FLOPs of one forward pass over sequences of these lengths. head_tokens: positions whose logits are
        computed; None = all."""
        lengths = list(lengths)
        tokens = sum(lengths)
        without_head = (sum(lengths) if head_tokens is None else head_tokens) - tokens
        quadratic = sum(self.attention_flops(length) for length in lengths)
        return float(tokens * self.flops_per_token + without_head * self.head_flops) + quadratic

    @property
    def attention_equals_rest_tokens(self) -> int:
        """Returns the length at which attention costs as much as all matrices; scales the quadratic part of a length's
        work."""
        return round(self.flops_per_token / (2 * self.num_layers * self.attention_size))


def head_shares(heads: int, key_heads: int) -> list[int]:
    """Returns the numbers of ranks or GPUs that attention heads can be split over: each divides the heads, and divides
    the key-value heads or is a multiple of them, which are then copied."""
    return [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a config.json says of the part that reads text: all of it, but for a model that also sees images."""
    return {**config, **(config.get("text_config") or {})}


def positions(config: Mapping[str, Any]) -> float:
    """Returns the tokens that vLLM lets a sequence of this model have, as it derives them from a config.json; infinite
    where that says nothing."""
    config = text_part(config)
    said = [config[key] for key in POSITION_KEYS if isinstance(config.get(key), int)]
    own = config.get("model_max_length")
    window = float(own) if isinstance(own, int) else float(min(said, default=math.inf))
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layers = [one for one in scaling.values() if isinstance(one, dict)]
    if by_layers:  # of each kind of layer; those of the widest sight count
        plain = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
        return max(positions(plain | {"rope_parameters": one}) for one in by_layers)
    kind = scaling.get("rope_type") or scaling.get("type")
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or "gemma3" in str(config.get("model_type")):
        return window
    if kind in YARN:  # some versions of vLLM, and some files, multiply here
        return max(window, factor * (original or 0))
    return window if kind in WITHIN_POSITIONS else window * factor


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Reads a shape out of what a config.json says. name: for errors, the value of `model.path`. Raises UnknownShape
    for whatever is not one of `DENSE` or of `EXPERTS`, or has layers of both kinds."""
    kind = str(config.get("model_type"))
    width, experts = EXPERTS.get(kind, ("intermediate_size", ""))
    of_experts = [width, experts, "num_experts_per_tok"] if experts else []
    missing = [key for key in (*KEYS, *of_experts) if not isinstance(config.get(key), int)]
    odd = [key for key in ("mlp_bias", "attention_bias", "mlp_only_layers") if config.get(key)]
    odd += ["decoder_sparse_step"] if experts and config.get("decoder_sparse_step", 1) != 1 else []
    if kind not in (*DENSE, *EXPERTS) or missing or odd:
        why = f"config.json lacks {', '.join(missing)}" if missing else f"{', '.join(odd)} is set" if odd else ""
        raise UnknownShape(
            f"`model.path` ({name}): the shape of a {kind} model {f'({why}) ' if why else ''}is not known; known are "
            f"the kinds {', '.join((*DENSE, *EXPERTS))}"
        )
    heads = config["num_attention_heads"]
    return ModelShape(
        model_type=kind,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config[width],
        experts=config[experts] if experts else 0,
        experts_per_token=config["num_experts_per_tok"] if experts else 0,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
    )


def read_config(path: str) -> dict[str, Any]:
    """Reads config.json of `model.path`: a directory, `pkg://PACKAGE/DIR`, or a hub name known here or in the hub's
    cache. Raises UnknownShape when there is none."""
    directory = Path(resolve_path(path))
    file = directory / "config.json" if directory.is_dir() else _known(path) or cached_config(path)
    if file is None or not file.is_file():
        known = ", ".join(sorted(one.stem.replace("--", "/") for one in _shipped().glob("*.json")))
        raise UnknownShape(
            f"`model.path` ({path}): no config.json in {file.parent if file else 'the Hugging Face cache'}; give a "
            f"directory that has one, download it (`hf download {path} config.json`), or take one of {known}"
        )
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnknownShape(f"`model.path` ({path}): {file} cannot be read ({error})") from error
    return config


def read_shape(path: str) -> ModelShape:
    """Returns the shape of `model.path`. Raises UnknownShape, a ValueError, when it cannot be found or is not
    described."""
    return shape_of(read_config(path), path)


def _shipped() -> Path:
    return config_dir() / "models"


def _known(name: str) -> Path | None:
    file = _shipped() / f"{name.replace('/', '--')}.json"
    return file if file.is_file() else None


def cached_config(name: str) -> Path | None:
    """Returns config.json of a hub's model in the cache; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a path that does not exist
        return None
    return Path(found) if isinstance(found, str) else None
