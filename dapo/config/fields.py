"""Functions that declare the configuration's fields: default, meaning, allowed values, and the names in verl and TRL.

`keys` lists all keys with these properties for the command line and config/README.md; `problems` lists the values of a
configuration that are not allowed.
"""

import copy
import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ABOUT = "about"  # key in a field's metadata, which OmegaConf ignores
RESUME = "resume"  # the same for a section: `About.resume` of its keys
MISSING = "???"  # OmegaConf's mark of a value that the user must give
ITEM = "[]"  # in a key's name: any item of a list
TYPES: dict[Any, str] = {  # text that follows `must be`
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list, such as [a, b]",
    dict: "a mapping, such as {a: 1}",
}
OWN = re.compile(r"(.+\.py):([A-Za-z_]\w*)")  # a user-defined function
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL, VALUE = re.compile(rf"(?:{_WORD}/)?{_WORD}"), re.compile(_WORD)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """Description of a field. values: the allowed values as text that follows `must be`; empty: all values of its type.
    holds: the same as a test. verl, trl: the names there, separated by commas. resume: what another value does to a run
    that is resumed: `meaning` alters what the run means, `course` only its weights, `harmless` neither; empty: as the
    section has it, and `meaning` without."""

    text: str
    values: str = ""
    holds: Callable[[Any], bool] = lambda value: True
    verl: str = ""
    trl: str = ""
    resume: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    name: str
    kind: Any
    default: Any
    about: About
    resume: str


def key(default: Any, text: str, **about: Any) -> Any:
    metadata = {ABOUT: About(text=text, **about)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def positive(default: float, text: str, also: str = "", **names: str) -> Any:
    """Field for a finite number above 0. also: text appended to the allowed range."""
    return key(default, text, values=f"greater than 0{also}", holds=lambda value: 0 < value < math.inf, **names)


def at_least(least: int, default: float, text: str, also: str = "", **names: str) -> Any:
    words = f"at least {least}" if least else "0 or more"
    return key(default, text, values=f"{words}{also}", holds=lambda value: least <= value < math.inf, **names)


def share(default: float, text: str, also: str = "", **names: str) -> Any:
    return key(default, text, values=f"above 0 and at most 1{also}", holds=lambda value: 0 < value <= 1, **names)


def one_of(choices: Sequence[str], default: str, text: str, **names: str) -> Any:
    return key(default, text, values=f"one of {', '.join(choices)}", holds=lambda value: value in choices, **names)


def one_of_or_own(choices: Sequence[str], default: str, text: str, **names: str) -> Any:
    """Field for one of `choices`, or for a user-defined function in a file (`dapo.algorithm.own`)."""
    return key(
        default,
        text,
        values=f"one of {', '.join(choices)}, or FILE.py:FUNCTION",
        holds=lambda value: value in choices or OWN.fullmatch(value) is not None,
        **names,
    )


def own(text: str, **names: str) -> Any:
    """Field for a user-defined function in a file; empty: the built-in one."""
    return key(
        "",
        text,
        values="empty, or FILE.py:FUNCTION",
        holds=lambda value: not value or OWN.fullmatch(value) is not None,
        **names,
    )


def node_labels(what: str) -> Any:
    """Field for labels that Ray nodes must have. what: the role that runs there."""
    return key(
        {},
        f"labels of the nodes for {what}: {{ray.io/accelerator-type: H100}}",
        values="names and values as Kubernetes' labels have them: letters, digits, `-_.`, in a name one `/`",
        holds=lambda labels: all(LABEL.fullmatch(name) and VALUE.fullmatch(str(labels[name])) for name in labels),
        resume="harmless",
    )


def section(kind: type, resume: str = "") -> Any:
    return dataclasses.field(default_factory=kind, metadata={RESUME: resume})


def keys(kind: Any, prefix: str = "", resume: str = "meaning") -> Iterator[Key]:
    """Yields every key of the dataclass `kind` and its sections in order, also those of items of lists of sections."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, of = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(of):
            yield from keys(of, f"{name}.", field.metadata[RESUME] or resume)
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        about: About = field.metadata[ABOUT]
        yield Key(name=name, kind=of, default=default, about=about, resume=about.resume or resume)
        for item in typing.get_args(of):
            if dataclasses.is_dataclass(item):
                yield from keys(item, f"{name}{ITEM}.", about.resume or resume)


def problems(cfg: Any, prefix: str = "") -> Iterator[str]:
    """Yields one line per value of `cfg` that its field does not allow, with key, value and allowed values."""
    for field in dataclasses.fields(cfg):
        name, value = f"{prefix}{field.name}", getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            yield from problems(value, f"{name}.")
            continue
        about: About = field.metadata[ABOUT]
        if not about.holds(value):
            yield f"`{name}` ({value}) must be {about.values}"
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if dataclasses.is_dataclass(item):
                yield from problems(item, f"{name}[{index}].")
