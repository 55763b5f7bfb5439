"""Derives parameter counts and FLOPs of a decoder from its config.json, without torch or network. config/models holds
the config.json of the shipped experiments' models, so that `dapo.plan` runs on a machine without them."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config.paths import config_dir, resolve_path

# Decoders with gated MLP and grouped-query attention. Qwen2 always has query, key and value biases; Qwen3 normalizes
# each head's query and key.
DENSE = ("qwen2", "qwen3", "llama", "mistral")
# Mixtures of experts without dense or shared parts in any layer: keys of an expert's width and of the expert count.
EXPERTS = {"qwen3_moe": ("moe_intermediate_size", "num_experts"), "mixtral": ("intermediate_size", "num_local_experts")}
# Keys of config.json for the number of positions; the smallest value counts.
POSITION_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
# Types of rotary scaling whose factor is already included in `max_position_embeddings`.
WITHIN_POSITIONS = (None, "default", "su", "longrope", "llama3", "deepseek_llama_scaling")
YARN = ("yarn", "deepseek_yarn")
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class UnknownShape(ValueError):
    """No config.json was found for the model, or `ModelShape` does not describe its architecture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Shape of a decoder. attention_bias: of query, key and value projections. qk_norm: RMS norm of each head's query
    and key. intermediate_size: width of the MLP, or of each expert. experts: number of experts per layer; a token
    passes through `experts_per_token` of them."""

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
        """Width of all heads' queries together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def head_shares(self) -> list[int]:
        return head_shares(self.num_heads, self.num_kv_heads)

    @property
    def mlp_width(self) -> int:
        """Intermediate width that one token uses in a layer: of the MLP, or of all its experts."""
        return self.intermediate_size * (self.experts_per_token or 1)

    @property
    def layer_matrices(self) -> int:
        """Parameters of one decoder layer that are multiplied with each token, router included."""
        attention = self.hidden_size * (2 * self.attention_size + 2 * self.kv_size)
        return attention + self.hidden_size * (3 * self.mlp_width + self.experts)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: matrices including all experts, biases, norms."""
        biases = self.attention_size + 2 * self.kv_size if self.attention_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        others = 3 * self.hidden_size * self.intermediate_size * (self.experts - self.experts_per_token)
        return self.layer_matrices + others + biases + norms

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size * self.experts

    @property
    def largest_parameter(self) -> int:
        """Elements of the actors' largest parameter: embedding, or all experts' gate and up of a layer."""
        return max(self.embedding_parameters, self.expert_parameters // 3 * 2)

    @property
    def loaded_at_once(self) -> int:
        """Parameters that an engine loads as one in a weight sync: the embedding, or a layer's experts."""
        return max(self.embedding_parameters, self.expert_parameters)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding matrix; an untied head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Parameters outside the decoder layers: embedding, head unless tied, final norm."""
        return self.embedding_parameters * (1 if self.tie_word_embeddings else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        return self.num_layers * self.layer_parameters + self.root_parameters

    @property
    def head_flops(self) -> int:
        return 2 * self.embedding_parameters

    @property
    def flops_per_token(self) -> int:
        """FLOPs of all matrices for one token, forward, head included; attention scores are not."""
        return 2 * self.num_layers * self.layer_matrices + self.head_flops

    def attention_flops(self, length: int) -> float:
        """FLOPs of causal attention over one sequence, forward: scores and weighted values, half of 4 h L^2."""
        return 2.0 * self.num_layers * self.attention_size * length * length

    def forward_flops(self, lengths: Iterable[int], head_tokens: int | None = None) -> float:
        """FLOPs of one forward pass. head_tokens: positions whose logits are computed; None = all."""
        lengths = list(lengths)
        tokens = sum(lengths)
        without_head = (sum(lengths) if head_tokens is None else head_tokens) - tokens
        quadratic = sum(self.attention_flops(length) for length in lengths)
        return float(tokens * self.flops_per_token + without_head * self.head_flops) + quadratic

    @property
    def attention_equals_rest_tokens(self) -> int:
        """Length at which attention costs as much as all matrices; scales the quadratic part of estimated work."""
        return round(self.flops_per_token / (2 * self.num_layers * self.attention_size))


def head_shares(heads: int, key_heads: int) -> list[int]:
    """Returns the numbers of ranks or GPUs that attention heads can be split over. Each divides the heads, and divides
    the key-value heads or is a multiple of them (key-value heads are then copied)."""
    return [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the text model: everything, overridden by `text_config` if the model also reads images."""
    return {**config, **(config.get("text_config") or {})}


def positions(config: Mapping[str, Any]) -> float:
    """Returns the maximum sequence length in tokens that vLLM derives from a config.json; infinite if it gives none."""
    config = text_part(config)
    said = [config[key] for key in POSITION_KEYS if isinstance(config.get(key), int)]
    own = config.get("model_max_length")
    window = float(own) if isinstance(own, int) else float(min(said, default=math.inf))
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layers = [one for one in scaling.values() if isinstance(one, dict)]
    if by_layers:  # one entry per kind of layer; the largest window counts
        plain = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
        return max(positions(plain | {"rope_parameters": one}) for one in by_layers)
    kind = scaling.get("rope_type") or scaling.get("type")
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or "gemma3" in str(config.get("model_type")):
        return window
    if kind in YARN:  # some vLLM versions and some config files multiply here
        return max(window, factor * (original or 0))
    return window if kind in WITHIN_POSITIONS else window * factor


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Returns the shape described by a config.json. name: `model.path`, for errors. Raises UnknownShape for a model
    type that is not in `DENSE` or `EXPERTS`, or with layers of both kinds."""
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
    """Reads config.json of `model.path`: a directory, `pkg://PACKAGE/DIR`, or a hub name in config/models or in the
    hub's cache. Raises UnknownShape if there is none."""
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
    """Returns the shape of `model.path`. Raises UnknownShape (a ValueError) if it is not found or not described."""
    return shape_of(read_config(path), path)


def _shipped() -> Path:
    return config_dir() / "models"


def _known(name: str) -> Path | None:
    file = _shipped() / f"{name.replace('/', '--')}.json"
    return file if file.is_file() else None


def cached_config(name: str) -> Path | None:
    """Returns the path of a hub model's config.json in the cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a path that does not exist
        return None
    return Path(found) if isinstance(found, str) else None
