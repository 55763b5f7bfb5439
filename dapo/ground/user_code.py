"""Loads functions that a user wrote, and describes their errors."""

import difflib
import hashlib
import importlib
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dapo.ground.redact import without_secrets

MAX_MESSAGE_CHARS = 200  # of an exception, which may quote the model's text


def describe(error: BaseException) -> str:
    """Returns type and shortened message: escaped, because it may quote the model's text; without secrets, because HTTP
    clients quote headers and URLs with keys."""
    message = without_secrets(str(error))
    short = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
    return f"{type(error).__name__}: {ascii(short)[1:-1]}"


def load_module(key: str, path: str, *, ready: dict[str, str]) -> ModuleType:
    """Imports a Python file or a dotted module. ready: modules by short name. Raises ValueError."""
    try:
        if path.endswith(".py"):
            file = Path(path).expanduser().resolve()
            return run_text(file.read_bytes(), str(file))
        return importlib.import_module(ready.get(path, path))
    except (Exception, SystemExit) as error:
        given = ", ".join(ready)
        remedy = f"give a Python file (*.py), a dotted module that can be imported on every node, or one of {given}"
        if path.endswith(".py") and not isinstance(error, OSError):
            remedy = "correct the file"
            if isinstance(error, ImportError):
                remedy += (
                    ". The file's folder is not searched for modules: name it in PYTHONPATH on every node if the file "
                    "imports others"
                )
        raise ValueError(f"`{key}` ({path!r}) cannot be imported ({describe(error)}); {remedy}") from error


def run_text(text: bytes, path: str) -> ModuleType:
    """Executes the text of a file as a module with a unique name: it shadows no module, and the file's folder is not
    added to the search path."""
    digest = hashlib.sha256(path.encode() + text).hexdigest()
    loader = _Text(text, path)
    spec = importlib.util.spec_from_loader(f"dapo_user_{Path(path).stem}_{digest[:16]}", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # needed by dataclasses and pickle
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


class _Text(importlib.abc.ExecutionLoader):
    def __init__(self, text: bytes, path: str) -> None:
        self._text, self._path = text, path

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._text)


def function_in(module: ModuleType, name: str, what: str) -> Callable[..., Any]:
    """Returns a function of a module. what: key and value, for the ValueError if there is none of that name."""
    function = vars(module).get(name)
    if callable(function):
        return function
    names = [other for other, value in vars(module).items() if inspect.isfunction(value)]
    near = difflib.get_close_matches(name, names, cutoff=0.4) or names[:5]
    hint = f"did you mean {' or '.join(near)}?" if near else "it has none"
    raise ValueError(f"{what} is no function of {module.__file__}; {hint}")
