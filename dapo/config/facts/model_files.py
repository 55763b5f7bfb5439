"""Reads a model's safetensors headers and checks them: names and shapes of tensors, and file lengths. Of the weights it
reads only a few rows of embedding and head."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config.facts.model_shape import cached_config, text_part

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100 << 20  # bytes; the format's limit
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # dtypes that can be trained
EMBEDDING, HEAD = ".embed_tokens.weight", ".lm_head.weight"  # name suffixes
WHOLE = "give a whole checkpoint of this model"
COMPARED_ROWS = 64  # rows compared of an embedding and a head that should be equal
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def offline_snapshot(name: str) -> Path | None:
    """Returns the cached folder of a hub model if HF_HUB_OFFLINE is set. Otherwise None, as missing files can still be
    downloaded; also None if it is not cached."""
    from huggingface_hub import constants

    found = cached_config(name) if constants.HF_HUB_OFFLINE else None
    return found.parent if found else None


def weights_problems(folder: Path) -> list[str]:
    """Returns problems of weight files, missing or truncated ones: the ranks would fail on them minutes later. Other
    safetensors files in the folder, such as an adapter's, are not checked."""
    problems = []
    try:
        sizes = {each.name: each.stat().st_size for each in folder.iterdir() if each.is_file()}
        named = {SINGLE} & set(sizes)
        if INDEX in sizes:
            named |= set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        if not named:
            named = {name for name in sizes if name.endswith(".safetensors")}
        for name in sorted(named):
            if name not in sizes:
                problems.append(f"{name} is missing, which {INDEX} names")
            elif sizes[name] != (whole := _whole_bytes(folder / name)):
                problems.append(f"{name} has {sizes[name]} bytes, and its header says {whole}: it is cut off")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        problems.append(f"a header or index cannot be read ({type(error).__name__}: {error})")
    return problems


def tensor_problems(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Returns contradictions between the files' tensors (names, shapes, types) and a config.json: another model, or
    tensors missing. Returns none where the files cannot be read: `weights_problems` reports that.

    config: transformers' version of it with all defaults, because `tie_word_embeddings` may be a default.
    """
    config, found = text_part(config), tensors(folder)
    vocabulary, layers, tied = (config.get(key) for key in ("vocab_size", "num_hidden_layers", "tie_word_embeddings"))
    problems = []
    if others := [name for name, one in found.items() if one.dtype not in FLOAT_TYPES and name.endswith(".weight")]:
        problems.append(
            f"{others[0]} is of type {found[others[0]].dtype}, and the actors train floating point weights "
            f"({', '.join(FLOAT_TYPES)}); give a checkpoint that is not quantised"
        )
    numbered = {int(match[1]) for name in found if (match := _LAYER.search(name))}
    if numbered and isinstance(layers, int) and (lacking := sorted({*range(layers)} - numbered)):
        shown = ", ".join(map(str, lacking[:4])) + (", ..." if lacking[4:] else "")
        problems.append(f"of {layers} layers (num_hidden_layers in config.json) {shown} are in no file; {WHOLE}")
    tall = [name for name, one in found.items() if len(one.shape) == 2 and one.shape[0] == vocabulary]
    embeddings, heads = ([name for name in found if f".{name}".endswith(end)] for end in (EMBEDDING, HEAD))
    if isinstance(vocabulary, int) and found and not tall:
        rows = f"; {embeddings[0]} has {found[embeddings[0]].shape[0]}" if embeddings else ""
        problems.append(f"no tensor has the {vocabulary} rows that vocab_size in config.json says{rows}; {WHOLE}")
    elif len(tall) == 1 and tied is False:
        problems.append(
            f"config.json says that the head is not the embedding (tie_word_embeddings: false), and no file holds a "
            f"head beside {tall[0]}; {WHOLE}, or set `tie_word_embeddings` to true there where they are one"
        )
    elif tied and embeddings and heads and _differ(found[embeddings[0]], found[heads[0]]):
        problems.append(
            f"config.json ties {embeddings[0]} and {heads[0]}, but they differ; set `tie_word_embeddings` to false "
            "there"
        )
    return problems


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file. first: byte offset of its data in the file. dtype: safetensors' name."""

    file: Path
    shape: list[int]
    dtype: str
    first: int
    size: int

    def row(self, number: int) -> bytes:
        length = self.size // self.shape[0]
        with self.file.open("rb") as file:
            file.seek(self.first + number * length)
            return file.read(length)


def tensors(folder: Path) -> dict[str, Stored]:
    """Returns tensors by name; empty if the files cannot be read, which `weights_problems` reports."""
    try:
        files = [folder / SINGLE]
        if not files[0].is_file():
            names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
            files = [folder / name for name in sorted(set(names))]
        found = {}
        for file in files:
            header, length = _header(file)
            for name, one in _tensors(header).items():
                first, end = one["data_offsets"]
                found[name] = Stored(file, one["shape"], one["dtype"], 8 + length + first, end - first)
        return found
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def _differ(one: Stored, other: Stored) -> bool:
    """Whether two tensors differ in some compared rows. Different dtypes are left to the ranks."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.shape[0]:
        return one.shape != other.shape
    step = -(-one.shape[0] // COMPARED_ROWS)
    return any(one.row(number) != other.row(number) for number in range(0, one.shape[0], step))


def _whole_bytes(path: Path) -> int:
    header, length = _header(path)
    return 8 + length + max((tensor["data_offsets"][1] for tensor in _tensors(header).values()), default=0)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"{path.name} has no header of safetensors")
        header: dict[str, Any] = json.loads(file.read(length))
        return header, length


def _tensors(header: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
