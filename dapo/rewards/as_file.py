"""Writes a function of a script or notebook as a Python file, because reward workers load functions from files."""

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dapo.ground.durable import write_text

PLAIN = (str, bytes, int, float, bool, type(None))


def file_of(function: Callable[..., Any], folder: Path) -> Path:
    """Returns the file that defines `function`: its module's, or for a function of a script or notebook a new one in
    `folder`, named by its content. Raises ValueError for a function that cannot be written as a file."""
    module = inspect.getmodule(function)
    if module is not None and module.__name__ != "__main__" and str(module.__file__ or "").endswith(".py"):
        return Path(str(module.__file__)).absolute()
    text = "\n\n".join(_sources(function, set())) + "\n"
    path = folder / f"{function.__name__}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def _sources(function: Any, seen: set[str]) -> list[str]:
    """Returns the source of what the function uses from outside of it, then its own."""
    name = getattr(function, "__name__", repr(function))
    if name == "<lambda>" or getattr(function, "__closure__", None):
        raise ValueError(f"reward function {name}: a lambda or inner function has no file; define it with def outside")
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ValueError(
            f"the source of reward function {name} is not known ({error}); give the path of its file"
        ) from error
    seen.add(name)
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    own = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    found: list[str] = []
    for used in dict.fromkeys(node.id for node in names):
        if used in function.__globals__ and used not in seen | own:
            seen.add(used)
            found += _definition(used, function.__globals__[used], name, seen)
    return [*found, source.rstrip()]


def _definition(name: str, value: Any, user: str, seen: set[str]) -> list[str]:
    if isinstance(value, ModuleType):
        return [f"import {value.__name__} as {name}"]
    if isinstance(value, re.Pattern):
        return [f"import re\n\n{name} = re.compile({value.pattern!r}, {value.flags})"]
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if inspect.isfunction(value) and module == "__main__" and qualified == name:
        return _sources(value, seen)
    if module not in (None, "__main__") and qualified is not None and "." not in qualified:
        return [f"from {module} import {qualified} as {name}"]
    if _is_plain(value):
        return [f"{name} = {value!r}"]
    raise ValueError(
        f"reward function {user} uses {name} ({type(value).__name__}) from outside of it, which a file cannot hold; "
        "make it inside of the function, or give the path of a file with both"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)
