"""Loads modules that a user wrote, and describes their errors."""

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from dapo.ground.redact import without_secrets

MAX_MESSAGE_CHARS = 200  # of an exception, which may quote the model's text


def describe(error: BaseException) -> str:
    """Returns type and shortened message: escaped, because it may quote the model's text; without secrets, because HTTP
    clients quote headers and URLs with keys."""
    message = without_secrets(str(error))
    short = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
    return f"{type(error).__name__}: {ascii(short)[1:-1]}"


def not_imported(key: str, path: str, error: BaseException, ready: Sequence[str]) -> str:
    """Returns the error message for a module (file or dotted name) that cannot be imported. ready: suggested names."""
    remedy = (
        f"give a Python file (*.py), a dotted module that can be imported on every node, or one of {', '.join(ready)}"
    )
    if Path(path).expanduser().is_file():
        remedy = "correct the file"
        if isinstance(error, ImportError):
            remedy = (
                "the file's folder is not searched for modules, so that none is shadowed: write what it imports into "
                "the file, or install it as a package, or name its folder in PYTHONPATH, on every node"
            )
    return f"`{key}` ({path!r}) cannot be imported ({describe(error)}); {remedy}"


def load_file(file: Path, kind: str) -> ModuleType:
    """Loads a file under a unique module name: it shadows no module, and its folder is not added to the search path.
    kind: part of the module's name."""
    name = f"dapo_{kind}_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    return run_module(importlib.util.spec_from_file_location(name, file))


def run_module(spec: ModuleSpec | None) -> ModuleType:
    """Executes and returns a module. If its code raises, the module is removed from `sys.modules` again."""
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # needed by dataclasses and pickle
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
