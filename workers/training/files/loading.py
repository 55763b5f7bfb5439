"""Makes a transformers model without memory, and reads this rank's rows of its weights straight from the safetensors
files.

In: `model.path`, a local directory or a hub name. Out: a model on the meta device; later, once it is sharded and has
memory, its weights and buffers. No rank ever holds the whole model.
"""

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
from workers.training.files.naming import MAX_NAMES_SHOWN, Part, whole
from workers.training.forward.attention import implementation

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
LONGROPE = "longrope"


def meta_model(cfg: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the causal language model of `model.path` on the meta device. dtype: of its parameters."""
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
    except OSError:  # it has none
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
    """Fills each parameter's local rows in place, converted to its type.

    parameters: (name, parameter with memory), a tied one under each of its names. prefix: the model's
    `base_model_prefix`, which files may lack or have. parts: what the files hold of a parameter, by name and shape.
    Raises ValueError that names the file or the tensor: no safetensors files, a missing, misshapen or quantised tensor,
    tied weights that differ.
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
    """Fills the buffers, whose memory is there but not written: those of the state from the files, all others (the
    frequencies of rotary embeddings) as the model's own initialisation makes them. Call it before `load_parameters`.

    Raises ValueError that names buffers which neither fills.
    """
    state = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in state}
    for tensor in [*model.parameters(), *buffers.values()]:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark of what is not to be drawn
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
    """Chooses the rotary frequencies of a model with LongRoPE for good, by the longest sequence that there may be, as
    engines do. Call it after `load_buffers`.

    transformers chooses anew in every forward pass, by the positions in it: a response's log-probabilities would depend
    on what it is packed with, and of sequence-parallel ranks the first would take other frequencies than the last.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == LONGROPE:
            module.inv_freq, _ = ROPE_INIT_FUNCTIONS[LONGROPE](module.config, module.inv_freq.device, seq_len=longest)
            module.rope_type = "default"


def _find_files(path: str) -> dict[str, str]:
    """Returns the file that holds each stored tensor, by name. A hub name: from the cache, or downloaded to it."""
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
    except EntryNotFoundError:  # also where the hub is out of reach and the cache lacks it
        return None
    except (HFValidationError, HfHubHTTPError) as error:
        raise ValueError(f"`model.path` ({path}) is neither a directory nor a readable hub name: {error}") from error


def _open(file: str) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} (of `model.path`) cannot be read as safetensors ({error}); fetch it again") from error


def _stored_name(name: str, files: Collection[str], prefix: str) -> str | None:
    """Returns `name` as the files have it: those of the base model alone lack its prefix, others may repeat it."""
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in files), None)


def _stored_parts(parts: list[Part], files: Collection[str], prefix: str) -> list[Part]:
    """Returns the parts by the names that the files have; none where one is missing."""
    names = [_stored_name(part.name, files, prefix) for part in parts]
    return [replace(part, name=name) for part, name in zip(parts, names, strict=True) if name] if all(names) else []


def _read(parts: list[Part], files: Mapping[str, str], parameter: Tensor, local: Tensor) -> None:
    """Fills `local`, this rank's rows of a parameter, converted to its type. Files are open, and so in this process's
    memory as far as they were read, for this one parameter only."""
    first = _first_row(parameter) if isinstance(parameter, DTensor) else 0
    with ExitStack() as stack:
        opened: dict[str, safe_open] = {}
        for part in parts:
            if part.expert is not None and not first <= part.expert < first + len(local):
                continue  # another rank's
            if (file := files[part.name]) not in opened:
                opened[file] = stack.enter_context(_open(file))
            stored = _checked(opened[file], file, part)
            if part.expert is None:
                local.copy_(stored[first : first + len(local)] if isinstance(parameter, DTensor) else stored[...])
            else:
                local[part.expert - first, part.start : part.start + part.shape[0]].copy_(stored[...])


def _checked(opened: safe_open, file: str, part: Part) -> Any:
    """Returns a tensor of the file, of which nothing is read yet. Raises ValueError for another type or shape."""
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
    """Returns the first local row's place in the whole: FSDP cuts like `torch.chunk`, equal parts but for the last."""
    assert parameter.placements[-1] == Shard(0), parameter.placements
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    rows_per_rank = -(-parameter.shape[0] // parameter.device_mesh.size(-1))
    return min(coordinate[-1] * rows_per_rank, parameter.shape[0])


def _some(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
