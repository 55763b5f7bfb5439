"""Sets groups aside that could not be trained on, with their scores and all that a replay needs. Files:
`quarantine/step_N-REASON/` in the output directory, with groups as Parquet and `why.json`. They are for users: a failed
write does not stop a run."""

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from dapo.ground.durable import write_text
from dapo.state.groups import FILE, write_groups
from dapo.types import Group

log = logging.getLogger(__name__)

QUARANTINE = "quarantine"
WHY = "why.json"
KEEP = 20  # entries of a run


def set_aside(
    output_dir: Path,
    groups: Sequence[tuple[Group, int]],
    *,
    version: int,
    reason: str,
    message: str,
) -> Path | None:
    """Writes an entry and returns its directory; on failure only warns, and returns None. The newest `KEEP` entries
    stay. groups: each with the policy version at its start. version: that the update started from. message: the error,
    or what was skipped."""
    root = output_dir / QUARANTINE
    name = f"step_{version:06d}-{reason}"
    path, count = root / name, 1
    while path.exists():  # a step can be refused again after a restart
        count += 1
        path = root / f"{name}-{count}"
    try:
        path.mkdir(parents=True)
        write_groups(path / FILE, groups)
        draws = [group.draw.index for group, _ in groups]
        about = {"version": version, "reason": reason, "message": message, "draws": draws}
        write_text(path / WHY, json.dumps(about, indent=1) + "\n")
        for old in sorted(root.glob("step_*"), key=lambda each: each.stat().st_mtime_ns)[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, ValueError, TypeError) as error:
        log.warning("groups of step %d could not be set aside under %s: %s", version, root, error)
        shutil.rmtree(path, ignore_errors=True)
        return None
    return path
