"""Sets groups aside that could not be trained on, with their scores and all that a replay needs. Files:
`quarantine/step_N-REASON/` in the output directory, with groups as Parquet, prompts as JSON lines, and `why.json`. They
are for users: a failed write does not stop a run."""

import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dapo.ground.durable import write_text
from dapo.state.groups import write_groups
from dapo.state.run_dir import CONFIG
from dapo.types import Draw, Group

log = logging.getLogger(__name__)

QUARANTINE = "quarantine"
WHY, PROMPTS = "why.json", "prompts.jsonl"
TEMPORARY = ".tmp"
KEEP = 20  # entries of a run


def set_aside(
    output_dir: Path,
    groups: Sequence[tuple[Group, int]],
    *,
    version: int,
    reason: str,
    message: str,
    metrics: Mapping[str, float],
) -> Path | None:
    """Writes an entry and returns its directory; on failure only warns, and returns None. The newest `KEEP` entries
    stay. groups: each with the policy version at its start. version: that the update started from. message: the error,
    or what was skipped. metrics: of the update, empty if it was refused."""
    root = output_dir / QUARANTINE
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
            "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
            "draws": [group.draw.index for group, _ in groups],
            "config": str(output_dir / CONFIG),
            "weights": f"checkpoints/step_{version:06d}, if it was kept",
        }
        write_text(temporary / WHY, json.dumps(about, indent=1) + "\n")
        final = _unused(root, f"step_{version:06d}-{reason}")
        temporary.replace(final)
        entries = sorted((path for path in root.glob("step_*") if path.is_dir()), key=lambda p: p.stat().st_mtime_ns)
        for path in entries[:-KEEP]:
            shutil.rmtree(path, ignore_errors=True)
    except (OSError, ValueError, TypeError) as error:
        log.warning("groups of step %d could not be set aside under %s: %s", version, root, error)
        shutil.rmtree(temporary, ignore_errors=True)
        return None
    return final


def _unused(root: Path, name: str) -> Path:
    """Returns a directory that does not exist: a step can be refused again after a restart."""
    path, count = root / name, 1
    while path.exists():
        count += 1
        path = root / f"{name}-{count}"
    return path


def _write_prompts(path: Path, draws: Sequence[Draw]) -> None:
    lines = []
    for draw in draws:
        prompt: dict[str, Any] = asdict(draw.prompt)
        prompt["token_ids"] = draw.prompt.token_ids.tolist()
        lines.append(json.dumps({"draw": draw.index, "prompt": prompt}, default=str) + "\n")
    write_text(path, "".join(lines))
