"""Reads what a model's safetensors files say of themselves: names and shapes of tensors, and where the files end.

In: a model's directory. Out: shapes by name, or what is wrong with the files. It reads headers alone, and no weight.
"""

import json
from pathlib import Path
from typing import Any

from dapo.config.facts.model_shape import cached_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100 << 20  # bytes; the format's own bound


def offline_snapshot(name: str) -> Path | None:
    """Returns the folder of a hub's model in the cache, where nothing can be added to it (HF_HUB_OFFLINE); None where
    it is not there, or what lacks can be downloaded."""
    from huggingface_hub import constants

    found = cached_config(name) if constants.HF_HUB_OFFLINE else None
    return found.parent if found else None


def weights_problems(folder: Path) -> list[str]:
    """Returns what is wrong with files of weights: one that is missing or cut off is found by the ranks minutes
    later. Those that lie beside a model's own, such as an adapter's, are not looked at."""
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


def shapes(folder: Path) -> dict[str, list[int]]:
    """Returns the shape of each tensor by its name; empty where the files cannot be read, which `weights_problems`
    tells."""
    try:
        files = [folder / SINGLE]
        if not files[0].is_file():
            names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
            files = [folder / name for name in sorted(set(names))]
        return {name: tensor["shape"] for file in files for name, tensor in _tensors(_header(file)[0]).items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def _whole_bytes(path: Path) -> int:
    """Returns how long a safetensors file is by its own header."""
    header, length = _header(path)
    return 8 + length + max((tensor["data_offsets"][1] for tensor in _tensors(header).values()), default=0)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns a file's header and its length in bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"{path.name} has no header of safetensors")
        header: dict[str, Any] = json.loads(file.read(length))
        return header, length


def _tensors(header: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
