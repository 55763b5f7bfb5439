"""The words of the repository: docstrings that are sentences."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PREPOSITIONS = set(
    "about above across after against along among around as at before behind below between beyond by down during for "
    "from in inside into like near of off on onto out outside over per since through to toward towards under until up "
    "upon with within without".split()
)
NO_VERBS = {"This", "Its", "Always", "Thus", "Plus", "Less", "Unless", "Others", "Those", "Bytes", "Tokens", "Seconds"}
NO_VERBS |= {"Prompts", "Responses", "Engines", "Ranks", "Lengths", "Gradients", "Columns", "Values", "Errors", "Files"}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """Name and docstring of the module and of everything in it that has one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield ("module" if isinstance(node, ast.Module) else node.name), text


def begins_with_a_preposition(text: str) -> bool:
    return text.split()[0].lower() in PREPOSITIONS


def begins_with_a_verb(text: str) -> bool:
    """Third person, as in "Returns the tokens ..."; a noun phrase, "The tokens ...", is not a sentence."""
    word = text.split()[0].rstrip(".,:;")
    return bool(re.fullmatch(r"[A-Z][a-z-]+s", word)) and word not in NO_VERBS


def files(*folders: str) -> list:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


@pytest.mark.parametrize(
    "path", files("dapo/ablation", "dapo/plan", "dapo/rewards", "dapo/simulate", "dapo/tiny", "workers/scoring")
)
def test_docstrings_begin_with_a_verb(path):
    wrong = [f"{name}: {text.splitlines()[0]}" for name, text in docstrings(path.read_text())]
    assert [line for line in wrong if not begins_with_a_verb(line.split(": ", 1)[1])] == []


@pytest.mark.parametrize(
    ("text", "verb", "preposition"),
    [
        ("Returns the tokens of a response.", True, False),
        ("Drops a group: none of its responses counts.", True, False),
        ("The tokens of a response.", False, False),
        ("Tokens of a response.", False, False),
        ("Whether a response ended.", False, False),
        ("Of a response.", False, True),
        ("Per token.", False, True),
        ("In the order of a step.", False, True),
        ("`name` by value.", False, False),
    ],
)
def test_the_rules_see_each_kind(text, verb, preposition):
    assert (begins_with_a_verb(text), begins_with_a_preposition(text)) == (verb, preposition)


def test_docstrings_of_everything_are_seen():
    source = '"""Reads."""\nclass A:\n    """Of one."""\n    async def f(self):\n        """Per step."""\n'
    assert dict(docstrings(source)) == {"module": "Reads.", "A": "Of one.", "f": "Per step."}
