"""Loads the held-out sets: those of `data.val_files`, where a list of files is one set and a mapping holds several by
name, and the `val_files` of the entries of `data.sources`.

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
from dapo.data.sources import held_out_files
from dapo.types import HeldOut


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
    for one in held_out_files(cfg.data):
        key = one.key
        counted, report = load_counted(
            one.files,
            tokenizer,
            max_prompt_length=cfg.data.max_prompt_length,
            max_contradictory=cfg.data.max_contradictory,
            key=key,
            reading=one.reading,
            today=today,
        )
        told(key, report)
        samples = tuple(max(cfg.eval.n, copies) for _, copies in counted)
        if max(samples) > MAX_SAMPLES:
            raise ValueError(
                f"`{key}` holds a problem {max(samples)} times, and each row is one of its samples, of which there may "
                f"be {MAX_SAMPLES}; remove copies"
            )
        loaded.append(HeldOut(name=one.name, prompts=tuple(prompt for prompt, _ in counted), samples=samples))
    return loaded
