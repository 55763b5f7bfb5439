"""Rules of the code base that a program can keep: sizes, docstrings, no text run as a program."""

import ast
from pathlib import Path

import pytest

from tests.support.source import tree

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("dapo", "workers") for path in (ROOT / folder).rglob("*.py"))
BANNED = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr"}  # `model.eval()` of torch is another


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def each():
    return [pytest.param(path, id=module_name(path)) for path in FILES]


@pytest.mark.parametrize("path", each())
def test_sizes(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 300
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 65, f"{node.name} is too long"


@pytest.mark.parametrize("path", each())
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(tree(path.read_text()))


def banned(source: str) -> list[str]:
    """What runs text or bytes as a program: by call, by import or under another name."""
    found = []
    for node in ast.walk(tree(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in BANNED:
                found.append(name)
            case ast.Attribute(value=ast.Name(id="builtins" | "sympy" | "sp"), attr=name) if name in BANNED:
                found.append(name)
            case ast.Attribute(attr="exec" | "__import__" | "sympify" | "parse_expr" as name):
                found.append(name)
            case ast.Attribute(value=ast.Name(id="pickle" | "cloudpickle" | "dill"), attr="load" | "loads" as name):
                found.append(f"pickle.{name}")
            case ast.ImportFrom(module="pickle" | "cloudpickle" | "dill"):
                found.append("pickle")
            case ast.alias(name=name) if name in BANNED:
                found.append(name)
            case ast.alias(name="builtins", asname=str()):
                found.append("builtins")
            case ast.keyword(arg="weights_only", value=ast.Constant(value=False)):
                found.append("weights_only=False")
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                found.append("shell=True")
    return found


@pytest.mark.parametrize("path", each())
def test_nothing_runs_text_as_a_program(path):
    assert banned(path.read_text()) == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        pytest.param("eval('1')", "eval", id="call"),
        pytest.param("run = exec", "exec", id="alias"),
        pytest.param("import builtins; builtins.exec('1')", "exec", id="attribute"),
        pytest.param("run = compile", "compile", id="compile"),
        pytest.param("__import__('os')", "__import__", id="import-call"),
        pytest.param("import builtins as b; b.eval('1')", "builtins", id="builtins"),
        pytest.param("from sympy import *; sympify('1')", "sympify", id="star-import"),
        pytest.param("import sympy; sympy.sympify('1')", "sympify", id="sympify"),
        pytest.param("from sympy.parsing import parse_expr as p", "parse_expr", id="import"),
        pytest.param("import pickle; pickle.loads(b'')", "pickle.loads", id="pickle"),
        pytest.param("from pickle import loads", "pickle", id="from-pickle"),
        pytest.param("torch.load(f, weights_only=False)", "weights_only=False", id="torch"),
        pytest.param("subprocess.run('ls', shell=True)", "shell=True", id="shell"),
    ],
)
def test_the_ban_sees_each_spelling(line, name):
    assert name in banned(line)


def test_the_trainer_reads_like_the_algorithm():
    lines = (ROOT / "dapo" / "trainer.py").read_text().splitlines()
    assert len(lines) <= 160
