"""Checks of `model`, `actor` and `weight_sync`."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dapo.config.facts.model_class import MASKLESS
from dapo.config.facts.model_files import INDEX, SINGLE, tensors
from dapo.config.facts.model_shape import UnknownShape, head_shares, positions, read_config, text_part
from dapo.config.names import ENGINE, nearest
from dapo.config.paths import checked_path, resolve_path
from dapo.config.schema import Config

# Keys of config.json for changes of the logits after the head. The actors compute only head and softmax.
LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
ALL_LINEAR, NO_TARGETS = "all-linear", ("lm_head", "embed_tokens")  # NO_TARGETS: head and embedding
LAYER_KINDS = ("full_attention", "sliding_attention", "attention")  # values of `layer_types` that the actors support
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # above 1: not dense
EXPERT_KINDS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")  # supported by both ranks and engines


def actor(cfg: Config) -> Iterator[str]:
    yield from _ranks(cfg)
    yield from _tokens(cfg)
    yield from _attention(cfg)
    yield from _lora(cfg)
    yield from _model(cfg, trains=True)


def served(cfg: Config) -> Iterator[str]:
    yield from _model(cfg, trains=False)


def _ranks(cfg: Config) -> Iterator[str]:
    ranks = cfg.actor.num_workers
    sizes = {"actor.ulysses_sequence_parallel_size": cfg.actor.ulysses_sequence_parallel_size}
    if cfg.actor.fsdp_size != -1:  # -1 is all ranks
        sizes["actor.fsdp_size"] = cfg.actor.fsdp_size
    for key, size in sizes.items():
        if size < 1 or ranks % size:
            divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            yield f"`{key}` ({size}) must divide `actor.num_workers` ({ranks}): {divisors}"


def _tokens(cfg: Config) -> Iterator[str]:
    prompt, response = cfg.data.max_prompt_length, cfg.data.max_response_length
    sequence_parallel = cfg.actor.ulysses_sequence_parallel_size
    room = cfg.actor.max_tokens_per_gpu * sequence_parallel
    if sequence_parallel >= 1 and room < prompt + response:
        yield (
            f"`actor.max_tokens_per_gpu` ({cfg.actor.max_tokens_per_gpu}) x `actor.ulysses_sequence_parallel_size` "
            f"({sequence_parallel}) must hold one sequence of `data.max_prompt_length` + `data.max_response_length` "
            f"({prompt} + {response} = {prompt + response}); raise one of them or lower the lengths"
        )


def _attention(cfg: Config) -> Iterator[str]:
    name = cfg.model.attn_implementation
    if cfg.actor.ulysses_sequence_parallel_size > 1 and name not in MASKLESS:
        yield (
            f"`model.attn_implementation` ({name}) needs a mask of the whole sequence, and with "
            f"`actor.ulysses_sequence_parallel_size` ({cfg.actor.ulysses_sequence_parallel_size}) a rank holds a part "
            f"of it; take one of {', '.join(MASKLESS)}"
        )


def _lora(cfg: Config) -> Iterator[str]:
    lora = cfg.model.lora
    if lora.rank > 0 and not lora.target_modules:
        yield "`model.lora.target_modules` is empty; give names of linear layers, or [all-linear]"


def model_directory(key: str, value: str) -> Iterator[str]:
    try:
        path = Path(checked_path(value, key=key))
    except ValueError as error:
        yield str(error)
        return
    if path.is_file():
        yield f"`{key}` ({value}) is a file; give the directory of a Hugging Face model that it is in"
    elif path.is_dir() and not (path / "config.json").is_file():
        yield f"`{key}` ({value}) holds no config.json; give the directory of a Hugging Face model"


def _model(cfg: Config, *, trains: bool) -> Iterator[str]:
    if found := [*model_directory("model.path", cfg.model.path)]:
        yield from found
        return
    path = Path(resolve_path(cfg.model.path))
    try:
        config = read_config(cfg.model.path)
    except UnknownShape as error:
        if path.is_dir():
            yield str(error)
        return  # a hub name that is not in the cache: the ranks repeat the check once they have its config.json
    yield from config_problems(cfg, config, trains=trains)
    if path.is_dir():
        yield from _files(cfg, path, trains=trains)
        yield from _targets(cfg, path) if trains and cfg.model.lora.rank > 0 else ()


def _targets(cfg: Config, path: Path) -> Iterator[str]:
    """Reports adapter targets that match no matrix in the model's files. Other errors, such as a target that is not a
    linear layer, are found by the ranks."""
    matrices = [name.removesuffix(".weight") for name, one in tensors(path).items() if len(one.shape) == 2]
    layers = list(dict.fromkeys(name.rpartition(".")[2] for name in matrices))
    targets = cfg.model.lora.target_modules
    if not layers or ALL_LINEAR in targets:
        return
    layers = [name for name in layers if name not in NO_TARGETS]
    if unknown := [target for target in targets if target.rpartition(".")[2] not in layers]:
        yield (
            f"`model.lora.target_modules` ({', '.join(unknown)}) must name linear layers of `model.path` "
            f"({cfg.model.path}) other than its head and embedding: {', '.join(layers)}, or {ALL_LINEAR}; "
            f"{nearest(unknown[0], [*layers, ALL_LINEAR])}"
        ).rstrip("; ")


def config_problems(cfg: Config, config: dict[str, Any], *, trains: bool) -> Iterator[str]:
    """config: the model's config.json. trains: whether there are ranks, not only engines."""
    yield from heads_problems(cfg, config, trains=trains)
    if trains:
        yield from architecture_problems(cfg, config)
    elif "hf_overrides" not in cfg.rollout.vllm:
        yield from _frequencies(cfg, text_part(config))
    yield from _context(cfg, config)


def _files(cfg: Config, path: Path, *, trains: bool) -> Iterator[str]:
    if any((path / name).is_file() for name in (SINGLE, INDEX)) or not (trains or reads_safetensors(cfg)):
        return
    if others := sorted(each.name for each in path.glob("*.bin")):
        unless = "" if trains else ", or set `rollout.vllm.load_format=hf`, which reads pickles too"
        yield (
            f"`model.path` ({cfg.model.path}) holds {others[0]} and no model.safetensors, from which ranks and engines "
            "read; convert it once: load it with transformers' AutoModelForCausalLM.from_pretrained and write it "
            f"with save_pretrained{unless}"
        )


def reads_safetensors(cfg: Config) -> bool:
    """Whether the engines read only safetensors files, which is the default."""
    return bool(cfg.rollout.vllm.get("load_format", "safetensors") == "safetensors")


def _context(cfg: Config, config: dict[str, Any]) -> Iterator[str]:
    prompt, response, wanted = cfg.data.max_prompt_length, cfg.data.max_response_length, engine_window(cfg)
    given = f"`rollout.vllm.max_model_len` ({wanted})"
    if "max_model_len" not in cfg.rollout.vllm:
        given = f"`data.max_prompt_length` + `data.max_response_length` ({prompt} + {response} = {wanted})"
    yield from window_problems(given, wanted, f"`model.path` ({cfg.model.path})", config, cfg.rollout.vllm)


def engine_window(cfg: Config) -> int:
    """Returns the maximum sequence length of the engines, in tokens."""
    given: int | None = cfg.rollout.vllm.get("max_model_len")
    return given or cfg.data.max_prompt_length + cfg.data.max_response_length


def window_problems(
    given: str, wanted: int, named: str, config: dict[str, Any], arguments: dict[str, Any]
) -> Iterator[str]:
    """Reports sequences of `wanted` tokens that vLLM would refuse when an engine with these arguments starts. Nothing
    is reported where vLLM leaves it to the user (VLLM_ALLOW_LONG_MAX_MODEL_LEN, `hf_overrides`). given: text that names
    the keys with this length; named: text that names the model."""
    if "hf_overrides" in arguments or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
        return
    if wanted > (window := positions(config)):
        yield (
            f"{given} must be at most {window:g}, the positions that {named} has by its config.json; lower the "
            "lengths, or take a model with a longer context"
        )


def heads_problems(cfg: Config, config: dict[str, Any], *, trains: bool = True) -> Iterator[str]:
    """Reports heads that cannot be divided among sequence-parallel ranks or an engine's GPUs, and layers among its
    stages. config: a config.json. trains: whether there are ranks."""
    named = f"`model.path` ({cfg.model.path})"
    if trains:
        size = cfg.actor.ulysses_sequence_parallel_size
        yield from shares_problems("actor.ulysses_sequence_parallel_size", size, named, config)
    if cfg.trainer.only != "train":
        yield from division_problems(ENGINE, cfg.rollout.vllm, named, config)


def division_problems(key: str, arguments: dict[str, Any], named: str, config: dict[str, Any]) -> Iterator[str]:
    """Reports heads that an engine's GPUs cannot divide, and more stages than layers. key: the arguments' section."""
    if "hf_overrides" in arguments:
        return
    yield from shares_problems(f"{key}.tensor_parallel_size", arguments.get("tensor_parallel_size"), named, config)
    stages, layers = arguments.get("pipeline_parallel_size"), text_part(config).get("num_hidden_layers")
    if isinstance(stages, int) and isinstance(layers, int) and stages > layers:
        yield f"`{key}.pipeline_parallel_size` ({stages}) must be at most {layers}, the layers of {named}"


def shares_problems(key: str, size: Any, named: str, config: dict[str, Any]) -> Iterator[str]:
    """Reports a number of ranks or GPUs, `size` of `key`, over which the heads cannot be split."""
    config = text_part(config)
    heads = config.get("num_attention_heads")
    if not isinstance(size, int) or size <= 1 or not isinstance(heads, int):
        return
    key_heads = config.get("num_key_value_heads") or heads
    fitting = head_shares(heads, key_heads)
    if size not in fitting:
        yield (
            f"`{key}` ({size}) must divide the {heads} attention heads of {named}, and divide its {key_heads} "
            f"key-value heads or be a multiple of them; it can be {', '.join(map(str, fitting))}"
        )


def architecture_problems(cfg: Config, config: dict[str, Any]) -> Iterator[str]:
    """Reports what the model computes and the actors do not support. config: a config.json."""
    named = f"`model.path` ({cfg.model.path})"
    config = text_part(config)
    yield from _frequencies(cfg, config)
    if others := sorted({*(config.get("layer_types") or ())} - {*LAYER_KINDS}):
        yield (
            f"{named} has layers of {', '.join(others)} (layer_types in config.json), and the actors, which lay "
            "sequences end to end, keep these apart in attention alone; choose a model whose layers are all attention"
        )
    if changed := [f"{key}: {config[key]}" for key in LOGIT_KEYS if config.get(key) not in (None, 1)]:
        yield (
            f"{named} changes its logits after the head ({', '.join(changed)} in config.json), which the actors do "
            "not compute; choose another architecture"
        )
    experts = [f"{key}: {config[key]}" for key in EXPERT_KEYS if (config.get(key) or 0) > 1]
    if experts and (kind := config.get("model_type")) not in EXPERT_KINDS:
        yield (
            f"{named} is a mixture of experts ({', '.join(experts)} in config.json) of the kind {kind}, whose tensors "
            f"the actors do not know how to read and write; they know those of {', '.join(EXPERT_KINDS)}, and dense "
            "models"
        )
    if cfg.model.attn_implementation != "auto":
        return
    remedy = "`model.attn_implementation=auto` does not compute; take flash_attention_2 there, or another model"
    if cap := config.get("attn_logit_softcapping"):
        yield f"{named} caps attention scores (attn_logit_softcapping: {cap} in config.json), which {remedy}"
    window, longest = _window(config), cfg.data.max_prompt_length + cfg.data.max_response_length
    if window < longest:
        yield (
            f"{named} has layers that see {window} tokens (sliding_window in config.json), fewer than "
            f"`data.max_prompt_length` + `data.max_response_length` ({longest}), which {remedy}, or lower the lengths"
        )


def _frequencies(cfg: Config, config: dict[str, Any]) -> Iterator[str]:
    """Reports dynamic rotary frequencies beyond the model's positions: transformers adapts them to the length, vLLM
    not."""
    prompt, response, window = cfg.data.max_prompt_length, cfg.data.max_response_length, "max_position_embeddings"
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [one.get("rope_type") or one.get("type") for one in (scaling, *scaling.values()) if isinstance(one, dict)]
    if "dynamic" in kinds and prompt + response > config.get(window, math.inf):
        yield (
            f"`model.path` ({cfg.model.path}) has rotary frequencies of the type dynamic (rope_parameters or "
            "rope_scaling in config.json), which ranks and engines make otherwise beyond its own positions: "
            f"`data.max_prompt_length` + `data.max_response_length` ({prompt} + {response} = {prompt + response}) must "
            f"be at most {config[window]} ({window} there); lower the lengths, or give that config.json another type, "
            "such as yarn"
        )


def _window(config: dict[str, Any]) -> float:
    """Returns the smallest attention window of the layers in tokens; infinite if all layers attend to everything."""
    if "layer_types" in config:
        slides = "sliding_attention" in config["layer_types"]
    else:
        first = config.get("max_window_layers", 0)
        slides = config.get("use_sliding_window", True) and first < config.get("num_hidden_layers", math.inf)
    return (slides and config.get("sliding_window")) or math.inf
