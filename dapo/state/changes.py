"""Compares the configuration of a resumed run with the one it was trained with: which changes alter its meaning
(`resume` at each field, `dapo.config.fields`)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from dapo.config.fields import ITEM, keys
from dapo.config.names import hint, known_keys, resumes
from dapo.config.schema import Config
from dapo.ground.redact import redacted


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    key: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"`{self.key}` is {self.there!r} there and {self.here!r} here"


def alters_meaning(key: str) -> bool:
    return resumes().get(key, "meaning") == "meaning"


def alters_course(key: str) -> bool:
    """Whether another value leads to other weights, also if the run means the same."""
    return resumes().get(key, "meaning") != "harmless"


def changes(there: dict[str, Any], here: dict[str, Any]) -> list[Change]:
    """Returns what differs, in the order of the configuration. there, here: as `dataclasses.asdict` of a `Config`, or
    parts of it. Not compared: other keys, and secrets, which a recorded configuration lacks."""
    before, after = values(redacted(there)), values(redacted(here))
    return [Change(key=key, there=before[key], here=after[key]) for key in before if before[key] != after[key]]


def values(config: dict[str, Any]) -> dict[str, Any]:
    return {one.name: value_of(config, one.name, one.default) for one in keys(Config) if ITEM not in one.name}


def check_accepted(accepted: Sequence[str]) -> None:
    for name in accepted:
        if name not in known_keys():
            raise ValueError(f"`checkpoint.accept_changes` names `{name}`, which is no key; {hint(name)}")


def is_accepted(key: str, accepted: Iterable[str]) -> bool:
    """Whether `accepted` has the key itself or a section around it."""
    return any(f"{key}.".startswith(f"{entry}.") for entry in accepted)


def value_of(config: Any, key: str, default: Any = None) -> Any:
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return [_plain(item) for item in default] if isinstance(default, list) else default
        config = config[part]
    return config


def _plain(item: Any) -> Any:
    return asdict(item) if is_dataclass(item) and not isinstance(item, type) else item
