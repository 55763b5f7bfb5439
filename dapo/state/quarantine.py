"""Sets groups aside that could not be trained on: with what they were scored, and all that replaying them needs.

In: groups of a batch, why, and the update's metrics. Out: `quarantine/step_N-REASON/` in the output directory, with the
groups and their prompts as Parquet and JSON lines, and `why.json`. A failure here ends no run: a person reads these
files.
"""

import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dapo.sampling.saved import read_groups, write_groups
from dapo.state.durable import write_text
from dapo.state.run_dir import CONFIG
from dapo.types import Draw, Group, Prompt

log = logging.getLogger(__name__)

QUARANTINE = "quarantine"  # in the output directory
WHY, PROMPTS = "why.json", "prompts.jsonl"
TEMPORARY = ".tmp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """Holds what one entry says. Made by `read_quarantined`.

    version: the policy version that the update started from. reason: as in the entry's name. message: the error, or
    what was skipped. metrics: of the update, empty where it was refused. groups: each with the version at its start.
    """

    version: int
    reason: str
    message: str
    metrics: dict[str, float | None]
    groups: list[tuple[Group, int]]


class Quarantine:
    """Keeps the newest `keep` entries of a run."""

    def __init__(self, output_dir: Path, *, keep: int = 20) -> None:
        self._output_dir = output_dir
        self._keep = keep

    def put(
        self,
        groups: Sequence[tuple[Group, int]],
        *,
        version: int,
        reason: str,
        message: str,
        metrics: Mapping[str, float] | None = None,
    ) -> Path | None:
        """Writes an entry and returns its directory; None where it cannot be written, which is only a warning.

        groups: each with the policy version at its start.
        """
        root = self._output_dir / QUARANTINE
        temporary = root / TEMPORARY
        try:
            root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write_groups(temporary, groups)
            _write_prompts(temporary / PROMPTS, [group.draw for group, _ in groups])
            about = {
                "version": version,
                "reason": reason,
                "message": message,
                "metrics": {name: _finite(value) for name, value in (metrics or {}).items()},
                "draws": [group.draw.index for group, _ in groups],
                "config": str(self._output_dir / CONFIG),
                "weights": f"checkpoints/step_{version:06d}, if it was kept",
            }
            write_text(temporary / WHY, json.dumps(about, indent=1) + "\n")
            final = _unused(root, f"step_{version:06d}-{reason}")
            temporary.replace(final)
            self._prune(root)
        except (OSError, ValueError, TypeError) as error:
            log.warning("groups of step %d could not be set aside under %s: %s", version, root, error)
            shutil.rmtree(temporary, ignore_errors=True)
            return None
        return final

    def _prune(self, root: Path) -> None:
        entries = sorted((path for path in root.glob("step_*") if path.is_dir()), key=lambda p: p.stat().st_mtime_ns)
        for path in entries[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)


def read_quarantined(directory: Path) -> Quarantined:
    """Reads an entry, for `dapo.batch.build_batch` to make the same batch of it again.

    Raises OSError, ValueError or KeyError where it is not one.
    """
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


def _unused(root: Path, name: str) -> Path:
    """Returns a directory that is not there: a step can be refused again after a restart."""
    path, count = root / name, 1
    while path.exists():
        count += 1
        path = root / f"{name}-{count}"
    return path


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_prompts(path: Path, draws: Sequence[Draw]) -> None:
    lines = []
    for draw in draws:
        prompt: dict[str, Any] = asdict(draw.prompt)
        prompt["token_ids"] = draw.prompt.token_ids.tolist()
        lines.append(json.dumps({"draw": draw.index, "prompt": prompt}, default=str) + "\n")
    write_text(path, "".join(lines))


def _read_prompts(path: Path) -> dict[int, Draw]:
    draws = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = row["prompt"]
        prompt["token_ids"] = np.array(prompt["token_ids"], dtype=np.int32)
        prompt["messages"] = tuple((role, content) for role, content in prompt["messages"])
        draws[row["draw"]] = Draw(index=row["draw"], prompt=Prompt(**prompt))
    return draws
