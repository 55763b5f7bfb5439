"""Loads the held-out sets of `data.val_files`: a list of files is one set, a mapping holds several by name.

Rows that repeat a problem are its samples, as in the published AIME-2024 file, 30 problems of 32 rows each: a problem
gets `eval.n` answers, or as many as it has rows where these are more. So the file and its 30 distinct rows ask the same
of a model at n 32, and so does the file at n 1.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from dapo.config.sampling import MAX_SAMPLES
from dapo.config.schema import Config
from dapo.data.prompts import DataReport, load_counted
from dapo.types import HeldOut

KEY = "data.val_files"


def sets_of(files: Any) -> dict[str, list[str]]:
    """Returns files by the name of their set, "" for a plain list. files: the checked value of `data.val_files`."""
    if not isinstance(files, dict):
        return {"": list(files)} if files else {}
    return {name: [one] if isinstance(one, str) else list(one) for name, one in files.items()}


def load_held_out(
    cfg: Config,
    tokenizer: Any,
    *,
    today: datetime | None = None,
    told: Callable[[str, DataReport], None] = lambda key, report: None,
) -> list[HeldOut]:
    """Returns the sets in the order of the configuration.

    tokenizer, today: as for `dapo.data.prompts.load_prompts`. told: called with the key of each set and what became of
    its rows. Raises ValueError: see there.
    """
    loaded = []
    for name, files in sets_of(cfg.data.val_files).items():
        key = f"{KEY}.{name}" if name else KEY
        counted, report = load_counted(
            files,
            tokenizer,
            max_prompt_length=cfg.data.max_prompt_length,
            max_contradictory=cfg.data.max_contradictory,
            key=key,
            today=today,
        )
        told(key, report)
        samples = tuple(max(cfg.eval.n, copies) for _, copies in counted)
        if max(samples) > MAX_SAMPLES:
            raise ValueError(
                f"`{key}` holds a problem {max(samples)} times, and each row is one of its samples, of which there may "
                f"be {MAX_SAMPLES}; remove copies"
            )
        loaded.append(HeldOut(name=name, prompts=tuple(prompt for prompt, _ in counted), samples=samples))
    return loaded
