"""Builds a transformers model on the meta device, and reads this rank's rows of its weights directly from the
safetensors files. `model.path` is a local directory or a hub name. No rank ever holds the whole model."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dapo.config.actor import ModelConfig
from dapo.workers.training.files.naming import MAX_NAMES_SHOWN, Part, whole
from dapo.workers.training.forward.attention import implementation

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
LONGROPE = "longrope"


def meta_model(cfg: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the causal language model of `model.path` on the meta device, with parameters of `dtype`."""
    config = AutoConfig.from_pretrained(cfg.path, trust_remote_code=cfg.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=implementation(cfg.attn_implementation),
            trust_remote_code=cfg.trust_remote_code,
        )
    try:
        model.generation_config = GenerationConfig.from_pretrained(cfg.path)
    except OSError:  # the model has none
        pass
    assert isinstance(model, PreTrainedModel)
    return model


@torch.no_grad()
def load_parameters(
    parameters: Iterable[tuple[str, Tensor]],
    path: str,
    prefix: str,
    parts: Callable[[str, Sequence[int]], list[Part]] = whole,
) -> None:
    """Fills each parameter's local rows in place, converted to its dtype.

    parameters: (name, parameter with memory); a tied one under each of its names. prefix: the model's
    `base_model_prefix`, which names in the files may lack or repeat. parts: the stored tensors of a parameter, by name
    and shape. Raises ValueError without safetensors files, for a missing, misshapen or quantised tensor, and if tied
    weights differ.
    """
    files = _find_files(path)
    named: dict[int, tuple[Tensor, list[list[Part]]]] = {}
    for name, parameter in parameters:
        named.setdefault(id(parameter), (parameter, []))[1].append(parts(name, parameter.shape))
    lacking = [[part.name for part in of[0] if not _stored_name(part.name, files, prefix)] for _, of in named.values()]
    sources = [
        (parameter, [there for parts in names if (there := _stored_parts(parts, files, prefix))])
        for parameter, names in named.values()
    ]
    if missing := [names[0] for names, (_, stored) in zip(lacking, sources, strict=True) if not stored]:
        raise ValueError(
            f"`model.path` ({path}): {len(missing)} of {len(named)} parameters are not in its safetensors files: "
            f"{_some(missing)}; the files hold {_some(sorted(files))}. Give a whole checkpoint of this architecture"
        )
    for parameter, stored in sources:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        _read(stored[0], files, parameter, local)
        for other in stored[1:]:
            found = torch.empty_like(local)
            _read(other, files, parameter, found)
            if not torch.equal(local, found):
                raise ValueError(
                    f"`model.path` ({path}): config.json ties {stored[0][0].name} and {other[0].name}, but they differ "
                    f"in {files[stored[0][0].name]}; set `tie_word_embeddings` to false there"
                )


@torch.no_grad()
def load_buffers(model: PreTrainedModel, path: str) -> None:
    """Fills the buffers, which have memory but no values yet. Call it before `load_parameters`. Buffers of the state
    dict come from the files, all others (frequencies of rotary embeddings) from the model's own initialisation. Raises
    ValueError that names the buffers which neither fills."""
    state = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in state}
    for tensor in [*model.parameters(), *buffers.values()]:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # so that transformers does not initialise it
    for name, buffer in model.named_buffers():
        if name not in state and buffer.is_floating_point():
            buffer.fill_(torch.nan)
    model.initialize_weights()
    if unset := [name for name, buffer in model.named_buffers() if name not in state and buffer.isnan().any()]:
        raise ValueError(
            f"`model.path` ({path}): nothing fills the buffers {_some(unset)}: no file holds them, and the model's "
            "code makes them where it is built alone; let its `_init_weights` make them too, as transformers' own do"
        )
    if buffers:
        load_parameters(buffers.items(), path, model.base_model_prefix)


def settle_frequencies(model: PreTrainedModel, longest: int) -> None:
    """Fixes the rotary frequencies of a LongRoPE model to those for the longest possible sequence, as engines do. Call
    it after `load_buffers`. transformers chooses them in every forward pass by the positions in it: a response's
    log-probabilities would depend on what it is packed with, and sequence-parallel ranks could use different
    frequencies."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == LONGROPE:
            module.inv_freq, _ = ROPE_INIT_FUNCTIONS[LONGROPE](module.config, module.inv_freq.device, seq_len=longest)
            module.rope_type = "default"


def _find_files(path: str) -> dict[str, str]:
    """Returns the file of each stored tensor, by name. Files of a hub name are downloaded unless cached."""
    if single := _find(path, SINGLE_FILE):
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    index = _find(path, INDEX_FILE)
    if index is None:
        others = sorted(p.name for p in Path(path).glob("*.bin")) if Path(path).is_dir() else []
        instead = f" but {_some(others)}" if others else ""
        raise ValueError(
            f"`model.path` ({path}) has neither {SINGLE_FILE} nor {INDEX_FILE}{instead}; "
            "each rank reads its rows from safetensors: convert it once with transformers' save_pretrained"
        )
    try:
        weight_map: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"`model.path` ({path}): {index} cannot be read ({error!r}); fetch it again") from error
    found = {name: _find(path, name) for name in sorted(set(weight_map.values()))}
    if absent := [name for name, file in found.items() if file is None]:
        raise ValueError(f"`model.path` ({path}): {index} names {_some(absent)}, which is not there; fetch it again")
    return {name: file for name, place in weight_map.items() if (file := found[place])}


def _find(path: str, name: str) -> str | None:
    if Path(path).is_dir():
        return str(Path(path, name)) if Path(path, name).is_file() else None
    try:
        return hf_hub_download(path, name)
    except EntryNotFoundError:  # also if the hub is unreachable and not in the cache
        return None
    except (HFValidationError, HfHubHTTPError) as error:
        raise ValueError(f"`model.path` ({path}) is neither a directory nor a readable hub name: {error}") from error


def _open(file: str) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} (of `model.path`) cannot be read as safetensors ({error}); fetch it again") from error


def _stored_name(name: str, files: Collection[str], prefix: str) -> str | None:
    """Returns `name` as the files have it, which may lack or repeat the base model's prefix."""
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in files), None)


def _stored_parts(parts: list[Part], files: Collection[str], prefix: str) -> list[Part]:
    """Returns the parts under their names in the files; empty if one is missing."""
    names = [_stored_name(part.name, files, prefix) for part in parts]
    return [replace(part, name=name) for part, name in zip(parts, names, strict=True) if name] if all(names) else []


def _read(parts: list[Part], files: Mapping[str, str], parameter: Tensor, local: Tensor) -> None:
    """Fills `local`, this rank's rows of a parameter, converted to its dtype. Files are open for one parameter only,
    because what was read stays in this process's memory while a file is open."""
    first = _first_row(parameter) if isinstance(parameter, DTensor) else 0
    with ExitStack() as stack:
        opened: dict[str, safe_open] = {}
        for part in parts:
            if part.expert is not None and not first <= part.expert < first + len(local):
                continue  # on another rank
            if (file := files[part.name]) not in opened:
                opened[file] = stack.enter_context(_open(file))
            stored = _checked(opened[file], file, part)
            if part.expert is None:
                local.copy_(stored[first : first + len(local)] if isinstance(parameter, DTensor) else stored[...])
            else:
                local[part.expert - first, part.start : part.start + part.shape[0]].copy_(stored[...])


def _checked(opened: safe_open, file: str, part: Part) -> Any:
    """Returns a stored tensor as a lazy slice. Raises ValueError for a wrong dtype or shape."""
    stored = opened.get_slice(part.name)
    if stored.get_dtype() not in FLOAT_TYPES:
        raise ValueError(
            f"{file} (of `model.path`): {part.name} is of type {stored.get_dtype()}, and the actors train floating "
            f"point weights ({', '.join(FLOAT_TYPES)}); give a checkpoint that is not quantised"
        )
    if stored.get_shape() != list(part.shape):
        raise ValueError(
            f"{file} (of `model.path`): {part.name} has shape {stored.get_shape()}, and config.json asks for "
            f"{list(part.shape)}; they are of different models"
        )
    return stored


def _first_row(parameter: DTensor) -> int:
    """Returns the index of the first local row: FSDP splits like `torch.chunk`, equal parts except the last."""
    assert parameter.placements[-1] == Shard(0), parameter.placements
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    rows_per_rank = -(-parameter.shape[0] // parameter.device_mesh.size(-1))
    return min(coordinate[-1] * rows_per_rank, parameter.shape[0])


def _some(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
