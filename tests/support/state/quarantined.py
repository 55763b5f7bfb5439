"""Reads what `dapo.state.quarantine` has set aside, for `dapo.batch.build_batch` to make the same batch of it again."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dapo.sampling.saved import read_groups
from dapo.state.quarantine import PROMPTS, WHY
from dapo.types import Draw, Group, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """What one entry says; groups, each with the version at its start."""

    version: int
    reason: str
    message: str
    metrics: dict[str, float | None]
    groups: list[tuple[Group, int]]


def read_quarantined(directory: Path) -> Quarantined:
    about = json.loads((directory / WHY).read_text(encoding="utf-8"))
    draws = _read_prompts(directory / PROMPTS)
    groups = read_groups(directory, lambda index: draws[index])
    return Quarantined(
        version=about["version"],
        reason=about["reason"],
        message=about["message"],
        metrics=about["metrics"],
        groups=groups,
    )


def _read_prompts(path: Path) -> dict[int, Draw]:
    draws = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = row["prompt"]
        prompt["token_ids"] = np.array(prompt["token_ids"], dtype=np.int32)
        prompt["messages"] = tuple((role, content) for role, content in prompt["messages"])
        draws[row["draw"]] = Draw(index=row["draw"], prompt=Prompt(**prompt))
    return draws
