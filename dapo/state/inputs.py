"""Records what a run reads (`inputs.json`) and detects changes; reads its recorded configuration."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dapo.ground.redact import redacted

INPUTS = "inputs.json"


def read_inputs(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / INPUTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def inputs_text(found: dict[str, str]) -> str:
    return json.dumps(redacted(found), indent=1) + "\n"


def changed_inputs(before: Path | None, found: dict[str, str]) -> list[str]:
    there = read_inputs(before) if before else {}
    here: dict[str, str] = redacted(found)
    return [f"`{key}` was {there[key]}, and is {now}" for key, now in here.items() if there.get(key, now) != now]


def read_config(file: Path, where: str) -> dict[str, Any]:
    """where: the directory, for the ValueError that a damaged file raises."""
    try:
        recorded = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except Exception as error:  # a YAML parser raises anything on a damaged file
        reason = f"{where} holds a run whose {file.name} cannot be read ({error})"
        raise ValueError(f"{reason}; restore it or give a new directory") from error
    return {str(key): value for key, value in recorded.items()} if isinstance(recorded, dict) else {}
