"""Rules of the code base that a program can keep: import direction, file and function size, waits with deadlines."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for folder in ("dapo", "workers") for path in (ROOT / folder).rglob("*.py"))
ENTRY_POINTS = {"dapo.main_ppo", "dapo.bench"}
ROLES = {"workers.rollout", "workers.reward", "workers.actor"}
VLLM_ALLOWED = {"workers.rollout", "workers.weight_receiver"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def each():
    return [pytest.param(path, id=module_name(path)) for path in FILES]


@pytest.mark.parametrize("path", each())
def test_import_direction(path):
    name, imported = module_name(path), imports_of(path)
    roots = {module.split(".")[0] for module in imported}
    if name.startswith("dapo") and name not in ENTRY_POINTS:
        assert not {"ray", "vllm", "workers"} & roots, f"{name} must stay pure"
    if "vllm" in roots:
        assert name in VLLM_ALLOWED
    if name in ROLES:
        assert not imported & (ROLES - {name}), "worker roles never import each other"
    if name.startswith("workers"):
        assert not imported & (ENTRY_POINTS | {"dapo.trainer"}), "workers do not know their conductor"
    if name == "dapo.config":
        assert not {"torch", "ray", "transformers"} & roots
    if name == "dapo.types":
        assert not {module for module in imported if module.startswith("dapo")}


@pytest.mark.parametrize("path", each())
def test_sizes(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 300
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 65, f"{node.name} is too long"


@pytest.mark.parametrize("path", each())
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", each())
def test_remote_waits_have_deadlines(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            if (node.func.value.id, node.func.attr) in {("ray", "get"), ("ray", "wait")}:
                assert any(keyword.arg == "timeout" for keyword in node.keywords), f"line {node.lineno}"


def test_model_text_is_never_evaluated():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                assert called not in {"sympify", "parse_expr"} and not (
                    called in {"eval", "exec"} and isinstance(node.func, ast.Name)
                ), f"{path.name}:{node.lineno}"


def test_the_trainer_reads_like_the_algorithm():
    lines = (ROOT / "dapo" / "trainer.py").read_text().splitlines()
    assert len(lines) <= 180
