"""Records what a run reads, and sees when that is not what it read before.

In: a line of text per input (`dapo.data.origins`). Out: `inputs.json` in the output directory, and what changed.
"""

import json
from pathlib import Path

from dapo.report.redact import redacted
from dapo.state.durable import write_text

INPUTS = "inputs.json"


def read_inputs(folder: Path) -> dict[str, str]:
    """Returns what was recorded in a folder; nothing where nothing was."""
    try:
        found = json.loads((folder / INPUTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def record_inputs(folder: Path, before: Path | None, found: dict[str, str]) -> list[str]:
    """Writes them into `folder`, and returns a line for each that is another one in the folder `before`."""
    there = read_inputs(before) if before else {}
    write_text(folder / INPUTS, json.dumps(redacted(found), indent=1) + "\n")
    here = read_inputs(folder)
    return [f"`{key}` was {there[key]}, and is {now}" for key, now in here.items() if there.get(key, now) != now]
