"""Every wait for a remote result has a deadline: what `.remote(…)` gives goes through `workers.remote` or a timeout."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import tree

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for folder in ("dapo", "workers") for path in sorted((ROOT / folder).rglob("*.py"))]
# What waits for as long as it takes, and what turns a result into something that is waited for later.
ENDLESS = {"gather", "as_completed", "anext", "aiter", "ensure_future", "create_task", "shield"}
BOUNDED = {"wait_for", "wait_for_stream"}  # and `wait` of workers.remote
CUT_BY_CALLER = {("workers/scoring/fleet.py", "_next"): "_parts"}  # which gives asyncio.wait a timeout
HELPERS = "workers/remote.py"


def name_of(call: ast.Call) -> str:
    """The last part of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def owner_of(call: ast.Call) -> str:
    """`asyncio` in asyncio.wait(…); empty for anything else than a plain name."""
    return getattr(call.func.value, "id", "") if isinstance(call.func, ast.Attribute) else ""


def has_deadline(call: ast.Call) -> bool:
    owner, name = owner_of(call), name_of(call)
    if (owner, name) in {("ray", "get"), ("ray", "wait"), ("asyncio", "wait")}:
        return any(keyword.arg == "timeout" for keyword in call.keywords)
    return name in BOUNDED or (owner, name) == ("", "wait")


def waits(node: ast.AST) -> bool:
    """Whether this expression or statement waits without end for what it is given."""
    if isinstance(node, ast.Call):
        ours = name_of(node) in ENDLESS or (owner_of(node), name_of(node)) in {
            ("ray", "get"),
            ("ray", "wait"),
            ("asyncio", "wait"),
        }
        return ours and not has_deadline(node)
    return isinstance(node, ast.Await | ast.AsyncFor | ast.comprehension)


def bounded(node: ast.AST) -> bool:
    """Whether everything inside has a deadline."""
    if isinstance(node, ast.AsyncWith):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        return any(name_of(call) in ("timeout", "timeout_at") for call in calls)
    return isinstance(node, ast.Call) and has_deadline(node)


def is_remote_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and name_of(node) == "remote" and owner_of(node) != "ray"


def mentions(node: ast.AST, names: set[str]) -> bool:
    """Whether a remote result is in the expression, itself or by the name that it was given."""
    return any(
        is_remote_call(each) or (isinstance(each, ast.Name) and each.id in names and isinstance(each.ctx, ast.Load))
        for each in ast.walk(node)
    )


def named_results(function: ast.AST) -> set[str]:
    """Names that hold remote results, or lists of them: `refs = […]`, `for ref in refs`."""
    names: set[str] = set()
    while True:
        found = set(names)
        for node in ast.walk(function):
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    if not isinstance(value, ast.Await) and mentions(value, names):
                        found.add(name)
                case (
                    ast.comprehension(target=ast.Name(id=name), iter=source)
                    | ast.For(target=ast.Name(id=name), iter=source)
                ):
                    if mentions(source, names):
                        found.add(name)
        if found == names:
            return names
        names = found


def unbounded(source: str, file: str = "") -> list[str]:
    """`function: line` of every wait for a remote result that may never end."""
    found = []
    for function in ast.walk(tree(source)):
        if isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef) and (file, function.name) not in CUT_BY_CALLER:
            names = named_results(function)
            found += [f"{function.name}: {line}" for line in _unbounded_in(function, names)]
    return found


def _unbounded_in(node: ast.AST, names: set[str]) -> Iterator[int]:
    for child in ast.iter_child_nodes(node):
        if bounded(child):
            continue
        subject = _subject(child)
        if subject is not None and waits(child) and (mentions_directly(subject, names) or is_anext(child)):
            yield getattr(child, "lineno", 0)
        yield from _unbounded_in(child, names)


def _subject(node: ast.AST) -> ast.AST | None:
    """What is waited for."""
    match node:
        case ast.Await(value=value):
            return value
        case ast.AsyncFor(iter=source) | ast.comprehension(iter=source, is_async=1):
            return source
        case ast.Call():
            return ast.Tuple(elts=list(node.args), ctx=ast.Load())
    return None


def is_anext(node: ast.AST) -> bool:
    """A stream that came as an argument cannot be told from others."""
    return isinstance(node, ast.Call) and name_of(node) == "anext"


def mentions_directly(node: ast.AST, names: set[str]) -> bool:
    """Sees what `mentions` does, but not inside a call: what that does with the result is its own business."""
    if is_remote_call(node):
        return True
    if isinstance(node, ast.Call | ast.Await):
        return False
    if isinstance(node, ast.Name):
        return node.id in names
    return any(mentions_directly(child, names) for child in ast.iter_child_nodes(node))


def test_production_code_has_no_wait_without_a_deadline() -> None:
    found = {}
    for path in FILES:
        file = str(path.relative_to(ROOT))
        if file != HELPERS and (lines := unbounded(path.read_text(), file)):
            found[file] = lines
    assert found == {}


def test_the_helpers_and_exceptions_are_where_they_are_looked_for() -> None:
    assert all(f"async def {name}(" in (ROOT / HELPERS).read_text() for name in ("wait", *BOUNDED - {"wait_for"}))
    for (file, function), caller in CUT_BY_CALLER.items():
        body = (ROOT / file).read_text()
        assert f"async def {function}(" in body and f"async def {caller}(" in body
    assert sum("await wait" in path.read_text() for path in FILES) >= 3, "the rule is about something"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("await worker.start.remote(1)", id="await"),
        pytest.param("ref = worker.start.remote(1)\n    return await ref", id="named"),
        pytest.param("refs = [w.start.remote() for w in ws]\n    await asyncio.gather(*refs)", id="gather"),
        pytest.param("await asyncio.gather(*[w.start.remote() for w in ws])", id="gather-at-once"),
        pytest.param("refs = [w.a.remote() for w in ws]\n    return [await ref for ref in refs]", id="one-by-one"),
        pytest.param("refs = [w.a.remote() for w in ws]\n    for ref in refs:\n        await ref", id="loop"),
        pytest.param("stream = w.a.options(num_returns='streaming').remote()\n    await anext(stream)", id="anext"),
        pytest.param("await (await anext(stream))", id="anext-of-an-argument"),
        pytest.param("async for ref in w.a.options(num_returns='streaming').remote():\n        pass", id="async-for"),
        pytest.param("asyncio.ensure_future(w.a.remote())", id="task"),
        pytest.param("await asyncio.wait([w.a.remote()])", id="asyncio-wait"),
        pytest.param("ray.get(w.a.remote())", id="ray-get"),
        pytest.param("refs = [w.a.remote() for w in ws]\n    ray.wait(refs)", id="ray-wait"),
    ],
)
def test_a_planted_wait_without_a_deadline_is_seen(body: str) -> None:
    assert unbounded(f"async def planted(w, ws, stream):\n    {body}\n") != []


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("await wait([w.a.remote()], 1, 'a', 'key')", id="wait"),
        pytest.param("await asyncio.wait_for(w.a.remote(), 1)", id="wait_for"),
        pytest.param("await asyncio.wait([asyncio.ensure_future(w.a.remote())], timeout=1)", id="asyncio-wait"),
        pytest.param("async with asyncio.timeout(1):\n        await w.a.remote()", id="timeout"),
        pytest.param("ray.get(w.a.remote(), timeout=1)", id="ray-get"),
        pytest.param("handle = cls.options(num_cpus=0).remote()\n    return handle", id="a-new-actor"),
        pytest.param("await asyncio.gather(*[pool.start() for pool in ws])", id="coroutines"),
    ],
)
def test_a_wait_with_a_deadline_is_not_an_error(body: str) -> None:
    assert unbounded(f"async def fine(w, ws):\n    {body}\n") == []
