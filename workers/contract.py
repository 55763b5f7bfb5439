"""Tells whether an installed library has a name that we rely on, and has it as we use it.

In: a `Name`. Out: in words, what is missing or has changed.
"""

import dis
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """Says what we rely on in one name of a library. path: `module:name`, or `module:Class.name`.

    call: the arguments that it must take, `a` by position and `a=` by name; None where we do not call it. awaited: it
    is a coroutine. has: attributes of a class or of its instances. holds: members of a Literal or a mapping. abstract:
    all that it asks of a subclass. public: all methods that it has, where ours stands in for it without inheriting.
    """

    path: str
    call: str | None = None
    awaited: bool = False
    has: str = ""
    holds: str = ""
    abstract: str = ""
    public: str = ""


def find(path: str) -> tuple[Any, Any]:
    """Returns what a path leads to, after what it lies in. Raises ImportError or AttributeError."""
    module, _, qualified = path.partition(":")
    owner, found = None, importlib.import_module(module)
    for part in qualified.split("."):
        owner, found = found, getattr(found, part)
    return owner, found


def broken(name: Name) -> Iterator[str]:
    """Yields what is not as `name` says."""
    try:
        owner, found = find(name.path)
    except ImportError as error:
        yield f"cannot be imported: {error}"
        return
    except (AttributeError, NameError):  # vllm.envs answers for its variables, and with this for itself
        yield "is missing"
        return
    try:
        yield from _differences(name, owner, found)
    except (AttributeError, TypeError, ValueError) as error:
        yield f"is something else now: {error}"


def _differences(name: Name, owner: Any, found: Any) -> Iterator[str]:
    if name.call is not None and (why := _refused(owner, found, name.call.split())):
        yield f"does not take ({name.call.replace(' ', ', ')}): {why}"
    if name.awaited and not inspect.iscoroutinefunction(found):
        yield "is no coroutine any more"
    if name.has and (less := set(name.has.split()) - attributes(found)):
        yield f"has no {_list(less)}"
    if name.holds and (less := set(name.holds.split()) - set(get_args(found) or found)):
        yield f"does not hold {_list(less)}"
    if name.abstract and (more := set(getattr(found, "__abstractmethods__", ())) - set(name.abstract.split())):
        yield f"asks subclasses for {_list(more)} too"
    if name.public and (more := _methods(found) - set(name.public.split())):
        yield f"has {_list(more)} too"


def _refused(owner: Any, found: Any, call: list[str]) -> str:
    """Returns why `found` cannot be called so, or ""."""
    method = inspect.isclass(owner) and inspect.isfunction(found)  # taken from its class, it wants `self` too
    positional = [None] * (method + sum(not each.endswith("=") for each in call))
    named = {each.removesuffix("="): None for each in call if each.endswith("=")}
    try:
        inspect.signature(found).bind(*positional, **named)
    except TypeError as error:
        return str(error)
    return ""


def _list(names: set[str]) -> str:
    return ", ".join(f"`{each}`" for each in sorted(names))


def _methods(owner: type) -> set[str]:
    return {each for each, value in vars(owner).items() if inspect.isfunction(value) and not each.startswith("_")}


def attributes(owner: type) -> set[str]:
    """Returns the attributes of a class, and those of its instances: annotated, or set on `self` by a method."""
    names = set(dir(owner))
    for each in owner.__mro__:
        names |= vars(each).get("__annotations__", {}).keys()
        for function in filter(inspect.isfunction, vars(each).values()):
            steps = pairwise(
                step for step in dis.get_instructions(inspect.unwrap(function)) if step.opname != "EXTENDED_ARG"
            )
            names |= {to.argval for of, to in steps if to.opname == "STORE_ATTR" and of.argval == "self"}
    return names
