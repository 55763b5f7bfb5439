"""Names the directory of a run that is given none, so that runs of different settings do not meet in one."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from dapo.config.fields import OWN
from dapo.config.names import resume_of
from dapo.config.schema import TrainerConfig

GIVEN = "trainer.output_dir"
LONGEST = 120  # letters of the added part
VAGUE = ("enable", "function", "kwargs", "mode", "name", "path")
_UNSAFE = re.compile(r"[^A-Za-z0-9.+]+")  # also what Hydra would want in quotes


def named(tree: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Sets `trainer.output_dir` of a composed tree, unless the overrides give it: to the experiment's, and after it the
    keys that they change, as in `outputs/dapo_tiny-n_8-lr_1e-5`. Keys that make no other run when it is resumed do not
    count (`resume="harmless"` at their field), nor do those of `checkpoint.accept_changes`, which continue a run."""
    parser = OverridesParser.create()
    parsed = [parser.parse_override(each) for each in overrides]
    values = {one.key_or_group: None if one.is_delete() else one.value() for one in parsed}
    if GIVEN not in values:
        base = tree.trainer.output_dir
        if base == TrainerConfig().output_dir and "experiment" in values:
            base = f"outputs/{values['experiment']}"
        tree.trainer.output_dir = base + _suffix(values, tree.checkpoint.accept_changes)
    return tree


def _suffix(values: Mapping[str, Any], accepted: Sequence[str]) -> str:
    continued = tuple(f"{key}." for key in accepted)
    changed = [key for key in sorted(values) if resume_of(key) != "harmless" and not f"{key}.".startswith(continued)]
    found = "".join(f"-{_short(key, changed)}_{_word(values[key])}" for key in changed)
    if len(found) <= LONGEST:
        return found
    return f"{found[: LONGEST - 9]}-{hashlib.sha256(found.encode()).hexdigest()[:8]}"


def _short(key: str, others: Sequence[str]) -> str:
    """Returns the end of a key that says what it is and tells it from the others."""
    *sections, short = key.split(".")
    while sections and (short in VAGUE or any(f".{one}".endswith(f".{short}") for one in others if one != key)):
        short = f"{sections.pop()}.{short}"
    return short


def _word(value: Any) -> str:
    """Returns a value in letters that are safe in a file's name; of files and functions the name alone."""
    if isinstance(value, Mapping):
        return "_".join(map(_word, value.values()))
    if isinstance(value, list | tuple):
        return "+".join(map(_word, value))
    if isinstance(value, float):
        return re.sub(r"e([+-]?)0+(?=\d)", r"e\1", f"{value:g}")
    if not isinstance(value, str):
        return str(value).lower()
    own = OWN.fullmatch(value)
    return _UNSAFE.sub("_", own[2] if own else PurePath(value).name).strip("_.")
