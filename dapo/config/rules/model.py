"""Checks of models: what the configuration and config.json say of them, their files, and their class in transformers;
also of `actor`."""

import ast
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dapo.config.actor import PACKED_ATTENTION
from dapo.config.facts.hub import unreachable
from dapo.config.facts.model_files import INDEX, SINGLE, offline_snapshot, tensor_problems, tensors, weights_problems
from dapo.config.facts.model_shape import UnknownShape, head_shares, positions, read_config, text_part
from dapo.config.names import ENGINE, nearest
from dapo.config.paths import checked_path, not_on_hub, resolve_path
from dapo.config.schema import Config

# Keys of config.json for changes of the logits after the head. The actors compute only head and softmax.
LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
ALL_LINEAR, NO_TARGETS = "all-linear", ("lm_head", "embed_tokens")  # NO_TARGETS: head and embedding
LAYER_KINDS = ("full_attention", "sliding_attention", "attention")  # values of `layer_types` that the actors support
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # above 1: not dense
EXPERT_KINDS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")  # supported by both ranks and engines
# All other attention implementations of transformers separate sequences by a mask over the whole micro-batch.
MASKLESS = (*PACKED_ATTENTION, "flash_attention_2", "flash_attention_3", "flash_attention_4")
MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
OTHER = "; choose another architecture"
POSITIONS = "position_ids"  # the fifth argument of each function in MASKS


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
        yield from _replayed(cfg, text_part(config))
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
    experts = _experts(config)
    if experts and (kind := config.get("model_type")) not in EXPERT_KINDS:
        yield (
            f"{named} is a mixture of experts ({', '.join(experts)} in config.json) of the kind {kind}, whose tensors "
            f"the actors do not know how to read and write; they know those of {', '.join(EXPERT_KINDS)}, and dense "
            "models"
        )
    if cfg.model.attn_implementation not in PACKED_ATTENTION:
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


def _experts(config: dict[str, Any]) -> list[str]:
    return [f"{key}: {config[key]}" for key in EXPERT_KEYS if (config.get(key) or 0) > 1]


def _replayed(cfg: Config, config: dict[str, Any]) -> Iterator[str]:
    if cfg.rollout.replay_experts and not _experts(config):
        yield (
            f"`rollout.replay_experts` (true) is for a mixture of experts, and `model.path` ({cfg.model.path}) is "
            f"dense (its config.json has none of {', '.join(EXPERT_KEYS)}); set it to false"
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


def stored(cfg: Config, *, trains: bool) -> Iterator[str]:
    """Checks the files of all models of a run, which would otherwise fail only after all processes have started."""
    wanted = (SINGLE, INDEX) if trains else ("*.safetensors",) if reads_safetensors(cfg) else ()
    others = {"reward.model.path": cfg.reward.model.path, "reward.judge.engine.path": cfg.reward.judge.engine.path}
    for key, path in {"model.path": cfg.model.path, **others}.items():
        if path and (problem := stored_problem(key, path, wanted if key == "model.path" else ())):
            yield "; ".join(problem)


def stored_problem(key: str, path: str, wanted: Sequence[str] = ()) -> tuple[str, str] | None:
    """Returns problem and remedy of a model that is neither here nor on the hub, or whose weights are missing or cut
    off; offline, of its copy in the hub's cache. wanted: patterns, one of which a file must match."""
    folder: Path | None = Path(resolve_path(path))
    again, whole = "copy or download the model again", "give the directory of a whole model"
    if not Path(resolve_path(path)).is_dir():
        if error := unreachable(path, "model"):
            return not_on_hub(key, path, error)
        folder = offline_snapshot(path)
        again = whole = f"`hf download {path}`, or unset HF_HUB_OFFLINE"
    if folder and (found := weights_problems(folder)):
        return f"`{key}` ({path}): {found[0]}", again
    if folder and wanted and not any(any(folder.glob(name)) for name in wanted):
        return f"`{key}` ({path}) holds no weights ({' or '.join(wanted)})", whole
    return None


def loadable(cfg: Config, *, trains: bool) -> Iterator[str]:
    """Checks what transformers says of the model, with its configuration from the hub if necessary. Imports torch."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    if trains:
        yield from _implementation(cfg)
    path, trusted = resolve_path(cfg.model.path), cfg.model.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    except OSError:  # no such model: reported when its tokenizer is loaded
        return
    except (ValueError, KeyError) as error:
        remedy = "choose another model, or install a transformers that knows it"
        if "trust_remote_code" in str(error):
            remedy = "set `model.trust_remote_code=true` if you trust that code"
        yield f"`model.path` ({path}): transformers cannot read its config.json: {_first(error)}; {remedy}"
        return
    if trains and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not trusted:
        yield (
            f"`model.path` ({path}) is of the kind {config.model_type}, of which transformers has no causal language "
            "model; choose another model, or set `model.trust_remote_code=true` where it brings its own code"
        )
    masked = cfg.model.attn_implementation not in MASKLESS
    if trains and (why := _class(config, path, trusted=trusted, masked=masked)):
        yield f"`model.path` ({path}): {why}"
    elif trains and (folder := Path(path) if Path(path).is_dir() else offline_snapshot(path)):
        yield from (f"`model.path` ({path}): {problem}" for problem in tensor_problems(folder, config.to_dict()))
    if not Path(path).is_dir():
        yield from config_problems(cfg, config.to_dict(), trains=trains)


def _class(config: Any, path: str, *, trusted: bool, masked: bool) -> str:
    """Returns why the model class cannot be used, or "". Code that cannot be imported is reported by the ranks."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if own is not None and trusted:
        try:
            model, base = get_class_from_dynamic_module(own, path), None
        except Exception:
            return ""
    else:
        model, base = (mapping.get(type(config), None) for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING))
    if model is None or isinstance(model, tuple):  # one of several, chosen by the configuration
        return ""
    if own is None and model.config_class is not type(config.get_text_config()):
        return f"{model.__name__} is not of text alone{OTHER}"
    why = why_not_packed(model, None if isinstance(base, tuple) else base, masked=masked)
    return why and f"{model.__name__} {why}"


def _implementation(cfg: Config) -> Iterator[str]:
    """Checks the attention name here: the ranks would fail only after all processes have started."""
    from transformers import AttentionInterface

    name, known = cfg.model.attn_implementation, sorted(AttentionInterface().valid_keys())
    if name not in (*PACKED_ATTENTION, *known):
        words = ", ".join((*PACKED_ATTENTION[1:], *known))
        yield f"`model.attn_implementation` ({name}) is unknown to transformers; take auto or one of {words}"
    elif name == "fa3" and not importlib.util.find_spec("flash_attn_interface"):
        yield (
            f"`model.attn_implementation` ({name}) needs the package flash_attn_interface (FlashAttention-3 for Hopper "
            "GPUs), which is not installed; install it on every node of the ranks, or take auto"
        )
    elif name == "flash_attention_2" and not any(map(importlib.util.find_spec, ("flash_attn", "kernels"))):
        yield (
            f"`model.attn_implementation` ({name}) needs the package flash-attn, which is not installed; install it on "
            "every node of the ranks, or take auto, which needs no package"
        )


def why_not_packed(model: Any, base: Any, *, masked: bool) -> str:
    """Returns why a model would not keep the sequences of a packed micro-batch separate, or could not be called on
    them; "" if its class shows no reason.

    model: the class with the head. base: the class below the head, or None if unknown. masked: whether the attention
    implementation is not in `MASKLESS`.
    """
    if model._is_stateful:
        return f"keeps a state from token to token, which runs from one sequence of a micro-batch into the next{OTHER}"
    taken = None if base is None else inspect.signature(base.forward).parameters.values()
    if not model._supports_attention_backend or (taken and all(each.kind is not each.VAR_KEYWORD for each in taken)):
        return f"computes attention by itself, over all sequences of a micro-batch at once{OTHER}"
    if masked and _masks_all(base or model):
        return (
            "makes its mask without the positions of tokens, over all sequences of a micro-batch at once; set "
            "`model.attn_implementation=auto`, which needs no mask"
        )
    return ""


def _masks_all(model: Any) -> bool:
    """Whether the class's source file creates a causal mask without passing position ids (sequence starts)."""
    calls = ast.walk(ast.parse(inspect.getsource(sys.modules[model.__module__])))
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in MASKS
        and len(call.args) < 5
        and not {POSITIONS, None} & {keyword.arg for keyword in call.keywords}  # None: **kwargs, not inspected
        for call in calls
    )


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
