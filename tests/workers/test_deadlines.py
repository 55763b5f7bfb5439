"""Every wait for a remote result has a deadline: what `.remote(…)` gives goes through `workers.remote` or a timeout."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import tree

ROOT = Path(__file__).resolve().parents[2]
# What waits for as long as it takes, and what turns a result into something that is waited for later.
ENDLESS = {"gather", "as_completed", "anext", "aiter", "ensure_future", "create_task", "shield"}
WITH_TIMEOUT = {"ray.get", "ray.wait", "asyncio.wait"}
BOUNDED = {"wait_for", "wait_for_stream", "timeout", "timeout_at"}
CUT_BY_CALLER = ("workers/scoring/fleet.py", "_next")  # `_parts` gives asyncio.wait a timeout
HELPERS = "workers/remote.py"


def name_of(node: ast.AST) -> str:
    """`a.b` of a call of it, with the last part alone where it is no call of a module's function."""
    if not isinstance(node, ast.Call):
        return ""
    named = ast.unparse(node.func)
    return named if named in WITH_TIMEOUT | {"ray.remote"} else named.rpartition(".")[2]


def has_deadline(node: ast.AST) -> bool:
    if isinstance(node, ast.AsyncWith):
        return any(has_deadline(item.context_expr) for item in node.items)
    name = name_of(node)
    if name in WITH_TIMEOUT:
        return any(keyword.arg == "timeout" for keyword in node.keywords)
    return name in BOUNDED or (isinstance(node, ast.Call) and ast.unparse(node.func) == "wait")


def mentions(node: ast.AST, names: set[str], *, deep: bool) -> bool:
    """Whether a remote result is in the expression, itself or by a name of `names`. deep: also inside of a call."""
    if name_of(node) == "remote" or (isinstance(node, ast.Name) and node.id in names):
        return True
    if not deep and isinstance(node, ast.Call | ast.Await):
        return False  # what that does with the result is its own business
    return any(mentions(child, names, deep=deep) for child in ast.iter_child_nodes(node))


def named_results(function: ast.AST) -> set[str]:
    """Names that hold remote results, or lists of them: `refs = […]`, `for ref in refs`."""
    names: set[str] = set()
    for _ in range(3):  # a name of a name of a name
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if not isinstance(value, ast.Await):
                    names |= {name} if mentions(value, names, deep=True) else set()
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    names |= {name} if mentions(value, names, deep=True) else set()
                case (
                    ast.comprehension(target=ast.Name(id=name), iter=value)
                    | ast.For(target=ast.Name(id=name), iter=value)
                ):
                    names |= {name} if mentions(value, names, deep=True) else set()
    return names


def endless_waits(node: ast.AST, names: set[str]) -> Iterator[int]:
    """Lines that wait without end for a remote result."""
    for child in ast.iter_child_nodes(node):
        if has_deadline(child):
            continue
        match child:
            case ast.Await(value=subject) | ast.AsyncFor(iter=subject) | ast.comprehension(iter=subject, is_async=1):
                waits = mentions(subject, names, deep=False)
            case ast.Call(args=args) if name_of(child) in ENDLESS | WITH_TIMEOUT:
                waits = name_of(child) == "anext" or any(mentions(each, names, deep=False) for each in args)
            case _:
                waits = False
        if waits:
            yield getattr(child, "lineno", 0)
        yield from endless_waits(child, names)


def unbounded(source: str, file: str = "") -> list[str]:
    return [
        f"{file}:{line} in {function.name}"
        for function in ast.walk(tree(source))
        if isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef) and (file, function.name) != CUT_BY_CALLER
        for line in endless_waits(function, named_results(function))
    ]


def test_production_code_has_no_wait_without_a_deadline() -> None:
    found = []
    for path in sorted(path for folder in ("dapo", "workers") for path in (ROOT / folder).rglob("*.py")):
        file, text = str(path.relative_to(ROOT)), path.read_text()
        if file != HELPERS and (".remote(" in text or "anext(" in text):
            found += unbounded(text, file)
    assert found == []


@pytest.mark.parametrize(
    "body",
    [
        "await worker.start.remote(1)",
        "ref = worker.start.remote(1); return await ref",
        "refs = [w.start.remote() for w in ws]; await asyncio.gather(*refs)",
        "refs = [w.a.remote() for w in ws]; return [await ref for ref in refs]",
        "await (await anext(stream))",
        "async for ref in w.a.options(num_returns='streaming').remote(): pass",
        "asyncio.ensure_future(w.a.remote())",
        "await asyncio.wait([w.a.remote()])",
        "ray.get(w.a.remote())",
    ],
)
def test_a_planted_wait_without_a_deadline_is_seen(body: str) -> None:
    assert unbounded(f"async def planted(w, ws, stream):\n    {body}\n") != []
