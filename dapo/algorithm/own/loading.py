"""Loads user-defined functions (`FILE.py:FUNCTION`) and calls them with the arguments that their parameters name. Each
file is read once per run, on the driver; ranks get its text as a `Source`. So no node needs the file, and a later
change of it does not affect the run."""

import hashlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from dapo.config.fields import OWN
from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from dapo.ground.user_code import describe, function_in, run_text

# Parameters that a function may have, by key; it may take any subset of them.
PARAMETERS = {
    "algorithm.policy_loss": (
        *("logprobs", "old_logprobs", "advantages", "segment_ids"),
        *("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    ),
    "algorithm.advantage.function": ("rewards", "lengths", "parts", "part_weights", "normalize_by_std"),
    "algorithm.token_weights": ("response_lengths", "mode", "group_sizes", "max_response_length"),
    "filter_groups.function": ("group", "min_scored"),
}


class OwnFunctionError(RuntimeError):
    """A user-defined function raised, or returned an invalid result; names the key, the function and the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The text of a file with the function that a key names. Made by `read`, consumed by `load`, on any node."""

    key: str
    path: str
    name: str
    text: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()

    def __str__(self) -> str:
        return f"`{self.key}` ({self.path}:{self.name})"


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFunction:
    """A loaded function. takes: the parameters that it has; None: all of the key's."""

    source: Source
    function: Callable[..., Any]
    takes: frozenset[str] | None

    def __call__(self, **available: Any) -> Any:
        """Calls it with the arguments that it takes. Raises OwnFunctionError if it raises."""
        given = available if self.takes is None else {name: available[name] for name in self.takes}
        try:
            return self.function(**given)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[1:]
            own = [frame for frame in frames if frame.filename == self.source.path]
            place = f" at line {own[-1].lineno} of {Path(self.source.path).name}" if own else ""
            raise OwnFunctionError(f"{self.source} raised {describe(error)}{place}") from error


def chosen(cfg: Config) -> dict[str, str]:
    """Returns FILE.py:FUNCTION of every user-defined function in the configuration, by key."""
    values = {key: attrgetter(key)(cfg) for key in PARAMETERS}
    return {key: value for key, value in values.items() if OWN.fullmatch(value)}


def make_absolute(cfg: Config) -> None:
    """Makes the paths of user-defined functions absolute, in place."""
    for key, value in chosen(cfg).items():
        section, _, field = key.rpartition(".")
        path, _, name = value.rpartition(":")
        setattr(attrgetter(section)(cfg), field, f"{_file(path)}:{name}")


def _file(path: str) -> Path:
    """Returns the absolute path of a file, also of one in a package (`pkg://PACKAGE/NAME`)."""
    return Path(resolve_path(path)).expanduser().absolute()


_loaded: dict[tuple[str, str], OwnFunction] = {}  # of this process: one reading per run


def forget() -> None:
    """Clears the cache at the start of a run, so that files are read again."""
    _loaded.clear()


def own_function(key: str, value: str) -> OwnFunction:
    """Returns the function of a key, as first read since `forget`. Raises ValueError as `read` and `load` do."""
    if (key, value) not in _loaded:
        _loaded[key, value] = load(read(key, value))
    return _loaded[key, value]


def problems(cfg: Config) -> Iterator[str]:
    """Reads and loads the user-defined functions of a run; yields a line for each that is not usable."""
    forget()
    for key, value in chosen(cfg).items():
        try:
            own_function(key, value)
        except ValueError as error:
            yield str(error)


def source_of(cfg: Config, key: str) -> Source | None:
    """Returns what ranks need to load the function of a key; None for a built-in one."""
    value = chosen(cfg).get(key)
    return None if value is None else own_function(key, value).source


def digests(cfg: Config) -> dict[str, str]:
    """Returns a line by key that identifies the functions by name and hash, not by folder."""
    found = {key: own_function(key, value).source for key, value in chosen(cfg).items()}
    return {key: f"{Path(one.path).name}:{one.name}, sha256 {one.digest}" for key, one in found.items()}


def read(key: str, value: str) -> Source:
    """Reads the file. Raises ValueError if it cannot be read."""
    file, _, name = value.rpartition(":")
    path = _file(file)
    try:
        return Source(key=key, path=str(path), name=name, text=path.read_bytes())
    except OSError as error:
        raise ValueError(f"`{key}` ({value}): the file cannot be read ({error}); give FILE.py:FUNCTION") from None


def load(source: Source) -> OwnFunction:
    """Runs the file's text as a separate module, and returns the function. It can import what is installed, but no file
    beside it. Raises ValueError if it cannot be imported, or lacks the function, or the function has an unknown
    parameter."""
    try:
        module = run_text(source.text, source.path)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{source} cannot be imported ({describe(error)}); it can import what is installed on every node, and no "
            "file beside it"
        ) from error
    function = function_in(module, source.name, str(source))
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{source} must be a plain function, and it is an `async def`; write `def`")
    return OwnFunction(source=source, function=function, takes=_takes(source, function))


def _takes(source: Source, function: Callable[..., Any]) -> frozenset[str] | None:
    there, parameters = PARAMETERS[source.key], inspect.signature(function).parameters.values()
    asked = [one for one in parameters if one.kind is not one.VAR_POSITIONAL]
    if any(one.kind is one.VAR_KEYWORD for one in asked):
        return None
    unknown = [
        one.name
        for one in asked
        if one.kind is one.POSITIONAL_ONLY or one.name not in there and one.default is one.empty
    ]
    if unknown:
        raise ValueError(
            f"{source} asks for {', '.join(unknown)}, which it is not given; parameters are given by name, any of "
            f"{', '.join(there)}; give others a default"
        )
    return frozenset(one.name for one in asked) & frozenset(there)
