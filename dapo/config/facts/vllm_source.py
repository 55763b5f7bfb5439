"""Reads out of the installed vLLM's source which engine arguments there are, and what each may hold.

In: names of arguments. Out: `Allowed`, for each. vLLM is not imported, which would take seconds and torch: its modules
are parsed, those that an argument's type comes from when it is first asked for. What the source does not say in plain
annotations (callables, types of other packages) is left to vLLM.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ARGUMENTS, CLASSES = "vllm.engine.arg_utils", ("EngineArgs", "AsyncEngineArgs")
LOADERS = "vllm.model_executor.model_loader"
# A mapping, by its annotation, that vLLM makes a class of.
MADE_INTO = {"speculative_config": "SpeculativeConfig"}
PLAIN = ("bool", "int", "float", "str", "list", "dict")
AS_LIST = ("set", "tuple", "Sequence", "Iterable")  # which take a list
BOUNDS = ("gt", "ge", "lt", "le")  # of pydantic's Field
AUTO = "auto"  # which stands beside the members of an enum
EARLY = ("before", "wrap", "plain")  # validators that may turn any value into one of the type


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """Says what a value may be. types: of `PLAIN`; choices: single values; sections: classes of vLLM, by their fields;
    bounds: (one of `BOUNDS`, number). Where all are empty nothing is certain."""

    types: frozenset[str] = frozenset()
    choices: tuple[str | int | bool, ...] = ()
    sections: tuple["Section", ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Holds a configuration class of vLLM. closed: whether it refuses names that are none of its fields."""

    name: str
    closed: bool
    fields: dict[str, Allowed] = field(hash=False)


class _Unknown(Exception):
    """Says that a type is none of those that are read here."""


def engine_arguments() -> frozenset[str]:
    """Returns the names of the installed vLLM's engine arguments, empty where it is not installed."""
    return frozenset(_annotated())


def load_formats() -> list[str]:
    """Returns what `load_format` may be, which its annotation leaves open; empty where vLLM is not installed."""
    return [str(one) for one in _allowed(ast.Name("LoadFormats"), LOADERS).choices]


@functools.cache
def allowed(argument: str) -> Allowed:
    """Returns what an engine argument may hold; nothing certain for one that there is not."""
    line = _annotated().get(argument)
    if line is None:
        return Allowed()
    made = ast.Name(MADE_INTO[argument]) if argument in MADE_INTO else line.annotation
    return _allowed(made, ARGUMENTS, _bounds(argument))


@functools.cache
def _annotated() -> dict[str, ast.AnnAssign]:
    """Returns the line of each engine argument."""
    classes = [_bound(ARGUMENTS).get(name) for name in CLASSES]
    return {name: line for one in classes if isinstance(one, ast.ClassDef) for name, line in _lines(one)}


def _lines(one: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for line in one.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id, line


@functools.cache
def _bound(module: str) -> dict[str, ast.stmt]:
    """Returns what a module of vLLM binds at its top, by name; nothing where its file is not there."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    path = Path(spec.submodule_search_locations[0]).joinpath(*module.split(".")[1:])
    file = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
    found: dict[str, ast.stmt] = {}
    for one in ast.parse(file.read_text(encoding="utf-8")).body if file else ():
        if isinstance(one, ast.ClassDef):
            found[one.name] = one
        elif isinstance(one, ast.ImportFrom):
            found |= dict.fromkeys((alias.asname or alias.name for alias in one.names), one)
        elif isinstance(one, ast.Assign):
            found |= {target.id: one for target in one.targets if isinstance(target, ast.Name)}
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            found[one.target.id] = one
    return found


def _found(name: str, module: str) -> tuple[ast.stmt, str]:
    """Returns what a name stands for in a module, and the module that says so. Raises _Unknown."""
    while isinstance(one := _bound(module).get(name), ast.ImportFrom):
        if one.level or one.module is None or not one.module.startswith("vllm."):
            raise _Unknown
        name = next(alias.name for alias in one.names if name in (alias.asname, alias.name))
        module = one.module
    if one is None:
        raise _Unknown
    return one, module


def _allowed(annotation: ast.expr, module: str, bounds: tuple[tuple[str, float], ...] = ()) -> Allowed:
    """Returns what an annotation allows; nothing certain where a part of it is not known."""
    try:
        parts = list(_parts(annotation, module))
    except _Unknown:
        return Allowed()
    return Allowed(
        types=frozenset().union(*(part.types for part in parts)),
        choices=tuple(dict.fromkeys(choice for part in parts for choice in part.choices)),
        sections=tuple(section for part in parts for section in part.sections),
        bounds=bounds,
    )


def _parts(annotation: ast.expr, module: str) -> Iterator[Allowed]:
    """Yields the members of a union; None is left out, for whoever gives it leaves the argument out."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        yield from _parts(annotation.left, module)
        yield from _parts(annotation.right, module)
    elif isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield from _parts(ast.parse(annotation.value, mode="eval").body, module)
    elif isinstance(annotation, ast.Constant) and annotation.value is None:
        return
    elif isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        yield from _generic(annotation.value.id, annotation.slice, module)
    elif isinstance(annotation, ast.Name):
        yield from _named(annotation.id, module)
    else:
        raise _Unknown


def _generic(name: str, inside: ast.expr, module: str) -> Iterator[Allowed]:
    members = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name == "Literal":
        for one in members:
            if isinstance(one, ast.Constant) and isinstance(one.value, str | int):
                yield Allowed(choices=(one.value,))
            else:
                yield from _parts(one, module)
    elif name in ("Optional", "Union"):
        for one in members:
            yield from _parts(one, module)
    elif name == "Annotated":
        yield from _parts(members[0], module)
    else:
        yield from _named(name, module)


def _named(name: str, module: str) -> Iterator[Allowed]:
    if name in PLAIN or name in AS_LIST:
        yield Allowed(types=frozenset({name if name in PLAIN else "list"}))
        return
    one, there = _found(name, module)
    if isinstance(one, ast.ClassDef) and any(_called(decorator) == "config" for decorator in one.decorator_list):
        yield Allowed(sections=(_section(name, there),))
    elif isinstance(one, ast.ClassDef) and "Enum" in _bases(one):
        yield Allowed(choices=(AUTO, *_members(one)))
    elif isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(one.value, ast.Subscript | ast.Name | ast.BinOp):
        yield from _parts(one.value, there)
    else:
        raise _Unknown


def _bases(one: ast.ClassDef) -> set[str]:
    return {base.attr if isinstance(base, ast.Attribute) else _called(base) for base in one.bases}


def _members(one: ast.ClassDef) -> Iterator[str]:
    for line in one.body:
        if isinstance(line, ast.Assign):
            yield from (target.id for target in line.targets if isinstance(target, ast.Name))


@functools.cache
def _section(name: str, module: str) -> Section:
    one = _bound(module)[name]
    assert isinstance(one, ast.ClassDef)
    methods = [line for line in one.body if isinstance(line, ast.FunctionDef)]
    early = {word for method in methods for word in _early(method)}
    plain = not one.bases and not any(method.name in ("__init__", "__new__") for method in methods)
    strict = all(isinstance(decorator, ast.Name) for decorator in one.decorator_list)  # else it may say `extra`
    return Section(
        name=name,
        closed=plain and strict and "" not in early,
        fields={
            field: _named_by(line.annotation, module)
            if {field, "*", ""} & early
            else _allowed(line.annotation, module, _limits(line.value))
            for field, line in _lines(one)
        },
    )


def _named_by(annotation: ast.expr, module: str) -> Allowed:
    """Returns what is certain of a field whose validator sees any value first: of an enum, that it makes members of
    their names, and that numbers may stand for them."""
    if not isinstance(annotation, ast.Name):
        return Allowed()
    try:
        one, _ = _found(annotation.id, module)
    except _Unknown:
        return Allowed()
    names = tuple(_members(one)) if isinstance(one, ast.ClassDef) and _bases(one) & {"Enum", "IntEnum"} else ()
    return Allowed(types=frozenset({"int"}), choices=(AUTO, *names)) if names else Allowed()


def _early(method: ast.FunctionDef) -> Iterator[str]:
    """Yields the fields whose values a validator sees before their types are checked; an empty name: all at once."""
    for decorator in method.decorator_list:
        if not isinstance(decorator, ast.Call) or not any(
            isinstance(option.value, ast.Constant) and option.value.value in EARLY for option in decorator.keywords
        ):
            continue
        if _called(decorator) == "model_validator":
            yield ""
        for one in decorator.args:
            yield one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else "*"


def _called(node: ast.expr) -> str:
    """Returns the name of what is called, or named."""
    called = node.func if isinstance(node, ast.Call) else node
    return called.id if isinstance(called, ast.Name) else ""


def _limits(default: ast.expr | None) -> tuple[tuple[str, float], ...]:
    """Returns the bounds that a field's default, `Field(default=1, ge=1)`, sets."""
    if default is None or _called(default) != "Field" or not isinstance(default, ast.Call):
        return ()
    return tuple(
        (option.arg, option.value.value)
        for option in default.keywords
        if option.arg in BOUNDS
        and isinstance(option.value, ast.Constant)
        and isinstance(option.value.value, int | float)
    )


@functools.cache
def _given() -> dict[str, tuple[str, str]]:
    """Returns the class and field that vLLM gives each engine argument to: `CacheConfig(block_size=self.block_size)`
    checks it."""
    engine = _bound(ARGUMENTS).get(CLASSES[0])
    calls = [node for node in ast.walk(engine) if isinstance(node, ast.Call)] if engine else []
    return {
        option.value.attr: (_called(call), option.arg)
        for call in calls
        if _called(call).endswith("Config")
        for option in call.keywords
        if option.arg and isinstance(option.value, ast.Attribute) and _called(option.value.value) == "self"
    }


def _bounds(argument: str) -> tuple[tuple[str, float], ...]:
    """Returns the bounds of the field that an engine argument is given to."""
    name, field = _given().get(argument, ("", ""))
    try:
        one, _ = _found(name, ARGUMENTS)
    except _Unknown:
        return ()
    lines = dict(_lines(one)) if isinstance(one, ast.ClassDef) else {}
    return _limits(lines[field].value) if field in lines else ()
