"""One entry of `data.sources`: its files, and settings for their problems. Defaults are those of a run without
sources."""

import re
from dataclasses import dataclass

from dapo.config.fields import MISSING, at_least, key, one_of, positive
from dapo.config.reward import RewardFunctionConfig

FORMATS = ("auto", "verl", "trl", "gsm8k", "qa", "math")
SET_NAME = re.compile(r"[\w.-]+")  # used in names of metrics


@dataclass(slots=True)
class SourceConfig:
    """A source holds problems that are read and scored alike; metrics stand under `source/NAME/`."""

    name: str = key(
        MISSING,
        "its name in metrics, and its `data_source` where the rows have none",
        values="letters, digits and `_.-`, neither `train` nor `eval`",
        holds=lambda value: SET_NAME.fullmatch(value) is not None,
    )
    files: list[str] = key([], "as `data.train_files`", values="at least one file or hub data set", holds=bool)
    val_files: list[str] = key([], "its held-out set: as one of that name in `data.val_files`, read and scored as here")
    weight: float = positive(1.0, "its share of the draws, next to the other weights")
    format: str = one_of(FORMATS, "auto", "as `data.format`")
    system_prompt: str = key("", "first message of each prompt, in place of the rows' own; empty: as the rows have it")
    max_response_length: int = at_least(
        0, 0, "tokens, at most `data.max_response_length`; a longer response is truncated; 0: the same"
    )
    functions: list[RewardFunctionConfig] = key(
        [], "reward functions in place of `reward.functions`, by their names in metrics as NAME:FUNCTION; empty: those"
    )
