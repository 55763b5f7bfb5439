"""Makes the fields of the configuration: default, meaning, allowed values, and the names that verl and TRL have for the
same.

In: one call per key in the dataclasses of `dapo.config`. Out: `keys`, all of them with what was said of them, for the
command line and config/README.md; and `problems`, every value of a configuration that is not allowed.
"""

import copy
import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ABOUT = "about"  # in a field's metadata, which OmegaConf leaves alone
MISSING = "???"  # OmegaConf's mark of a value that the person must give
ITEM = "[]"  # in a name: any item of a list
TYPES: dict[Any, str] = {  # in words that follow `must be`
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list, such as [a, b]",
    dict: "a mapping, such as {a: 1}",
}
OWN = re.compile(r"(.+\.py):([A-Za-z_]\w*)")  # a function in a file of a person's own
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL, VALUE = re.compile(rf"(?:{_WORD}/)?{_WORD}"), re.compile(_WORD)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """Holds what a field says of itself. values: the allowed ones in words that follow `must be`, empty for all of its
    type; holds: the same as a test. verl, trl: their names, with a comma between several."""

    text: str
    values: str = ""
    holds: Callable[[Any], bool] = lambda value: True
    verl: str = ""
    trl: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Holds a key with its dotted name, its type and the default of its type's class."""

    name: str
    kind: Any
    default: Any
    about: About


def key(default: Any, text: str, **about: Any) -> Any:
    """Returns a field; `about` as in `About`."""
    metadata = {ABOUT: About(text=text, **about)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def positive(default: float, text: str, also: str = "", **names: str) -> Any:
    """Returns a field for a finite number above 0. also: added to the words of its range."""
    return key(default, text, values=f"greater than 0{also}", holds=lambda value: 0 < value < math.inf, **names)


def at_least(least: int, default: float, text: str, also: str = "", **names: str) -> Any:
    """Returns a field for a finite number from `least` on."""
    words = f"at least {least}" if least else "0 or more"
    return key(default, text, values=f"{words}{also}", holds=lambda value: least <= value < math.inf, **names)


def share(default: float, text: str, also: str = "", **names: str) -> Any:
    """Returns a field for a part of a whole, in (0, 1]."""
    return key(default, text, values=f"above 0 and at most 1{also}", holds=lambda value: 0 < value <= 1, **names)


def one_of(choices: Sequence[str], default: str, text: str, **names: str) -> Any:
    """Returns a field for one of `choices`."""
    return key(default, text, values=f"one of {', '.join(choices)}", holds=lambda value: value in choices, **names)


def one_of_or_own(choices: Sequence[str], default: str, text: str, **names: str) -> Any:
    """Returns a field for one of `choices`, or for a function in a person's own file (`dapo.own`)."""
    return key(
        default,
        text,
        values=f"one of {', '.join(choices)}, or FILE.py:FUNCTION",
        holds=lambda value: value in choices or OWN.fullmatch(value) is not None,
        **names,
    )


def own(text: str, **names: str) -> Any:
    """Returns a field for a function in a person's own file; empty: the built-in one."""
    return key(
        "",
        text,
        values="empty, or FILE.py:FUNCTION",
        holds=lambda value: not value or OWN.fullmatch(value) is not None,
        **names,
    )


def node_labels(what: str) -> Any:
    """Returns a field for labels that nodes of a Ray cluster must have. what: runs there."""
    return key(
        {},
        f"labels, as `ray start --labels` or Ray itself gives them, that a node must have for {what}: "
        "{ray.io/accelerator-type: H100}; empty: any node",
        values="names and values as Kubernetes' labels have them: letters, digits, `-_.`, in a name one `/`",
        holds=lambda labels: all(LABEL.fullmatch(name) and VALUE.fullmatch(str(labels[name])) for name in labels),
    )


def section(kind: type) -> Any:
    """Returns a field that holds a section with its defaults."""
    return dataclasses.field(default_factory=kind)


def keys(kind: Any, prefix: str = "") -> Iterator[Key]:
    """Yields every key of the dataclass `kind` and its sections in their order, items of lists of sections included."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, of = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(of):
            yield from keys(of, f"{name}.")
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        yield Key(name=name, kind=of, default=default, about=field.metadata[ABOUT])
        for item in typing.get_args(of):
            if dataclasses.is_dataclass(item):
                yield from keys(item, f"{name}{ITEM}.")


def problems(cfg: Any, prefix: str = "") -> Iterator[str]:
    """Yields one line per value of `cfg` that its field does not allow, with key, value and what is allowed."""
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
