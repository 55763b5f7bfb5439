"""No module of dapo/rewards evaluates text, however the call is spelled."""

import ast
from pathlib import Path

import pytest

from dapo import rewards
from tests.support.source import tree

BANNED = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr"}
PACKAGE = Path(rewards.__file__).parent


def banned_names(source: str) -> set[str]:
    """The banned names that the source imports or mentions; `re.compile` evaluates nothing."""
    names: set[str] = set()
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr != "compile":
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.update(node.name.split("."))
    return names & BANNED


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_in_rewards_evaluates_text(file: Path) -> None:
    assert banned_names(file.read_text()) == set()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        pytest.param("eval('1')", "eval", id="call"),
        pytest.param("import builtins; builtins.exec('1')", "exec", id="attribute"),
        pytest.param("run = compile", "compile", id="alias"),
        pytest.param("from sympy import *; sympify('1')", "sympify", id="star-import"),
        pytest.param("from sympy.parsing import parse_expr as p", "parse_expr", id="import"),
    ],
)
def test_the_ban_sees_each_spelling(line: str, name: str) -> None:
    assert name in banned_names(line)
