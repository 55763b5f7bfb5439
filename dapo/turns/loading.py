"""Loads the rollout function: a ready one by short name, a user-defined one from a file or an importable module."""

import hashlib
import inspect
import sys
from pathlib import Path
from typing import Any

from dapo.config.fields import TYPES
from dapo.config.sampling import RolloutFunctionConfig
from dapo.ground.user_code import function_in, load_module
from dapo.turns.session import Function

READY = {name: f"dapo.turns.{name}" for name in ("one_turn", "retry", "tool_use")}
KEY = "rollout.function"


def load(spec: RolloutFunctionConfig) -> Function:
    """Returns the function. Raises ValueError with key, value and remedy."""
    module = load_module(f"{KEY}.path", spec.path, ready=READY)
    function = function_in(module, spec.name, f"`{KEY}.name` ({spec.name!r})")
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"`{KEY}.name` ({spec.name!r}) must be an `async def` function of {spec.path}")
    try:
        inspect.signature(function).bind(None, None, None, **spec.kwargs)
    except TypeError as error:
        raise ValueError(
            f"`{KEY}` ({spec.name} of {spec.path}) cannot be called with prompt, generate, sampling and "
            f"`{KEY}.kwargs` {sorted(spec.kwargs)}: {error}; fix the function or the kwargs"
        ) from None
    if spec.path in READY:
        _check_values(function, spec.kwargs)
    return function


def _check_values(function: Function, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for an argument of the wrong type for a ready function; otherwise every response would fail."""
    for name, value in kwargs.items():
        kind = inspect.signature(function).parameters[name].annotation
        if type(value) is not kind:
            raise ValueError(f"`{KEY}.kwargs.{name}` ({value}) must be {TYPES[kind]}")


def runs_programs(function: Function, kwargs: dict[str, Any]) -> bool:
    """Whether the function, called with `kwargs`, runs programs of the model in the sandbox: RUNS_PROGRAMS of its
    module is true or names the argument that enables it."""
    flag = vars(sys.modules[function.__module__]).get("RUNS_PROGRAMS")
    return flag is True or (isinstance(flag, str) and bool(kwargs.get(flag)))


def digest_of(function: Function) -> str:
    """SHA-256 of the function's file; all workers of a run must agree on it."""
    return hashlib.sha256(Path(str(sys.modules[function.__module__].__file__)).read_bytes()).hexdigest()


def file_of_function(spec: RolloutFunctionConfig) -> dict[str, str]:
    """Returns the file, name and SHA-256 of a user-defined function by key, for comparison when a run is resumed."""
    if not spec.path.endswith(".py"):
        return {}
    file = Path(spec.path).expanduser()
    return {f"{KEY}.path": f"{file.name}:{spec.name}, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}"}
