"""The words of the repository: docstrings are sentences, and what a text refers to is there."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import tree

ROOT = Path(__file__).resolve().parents[2]
ABSENT = "DES" + "IGN"  # in two parts, or this file would hold the word itself
PREPOSITIONS = set(
    "about above across after against along among around as at before behind below between beyond by down during for "
    "from in inside into like near of off on onto out outside over per since through to toward towards under until up "
    "upon with within without".split()
)
PLURALS = set(  # first words that end like a verb
    "Actors Adapters Always Brackets Buckets Bytes Characters Checkpoints Choices Errors Files Gradients Indices Its "
    "Kwargs Lengths Less Lines Log-probabilities Logits Loss Metrics Others Parameters Plus Prompts Ranks Responses "
    "Rows Seconds Sequences Slots This Those Thus Tokens Unless Values Verdicts Weights".split()
)
VERBS = (
    "is|are|has|have|adds?|compare|takes?|trains?|turns?|travel|come|sample|starts|steps|assumes|holds?|runs?|goes?|go"
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Yields name, node and docstring of the module and of everything in it that has one."""
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            yield ("module" if isinstance(node, ast.Module) else node.name), node, " ".join(text.split())


def begins_with_a_preposition(text: str) -> bool:
    return text.split()[0].lower() in PREPOSITIONS


def begins_with_a_verb(text: str) -> bool:
    """Third person, as in "Returns the tokens ..."; a noun phrase, "The tokens ...", is not a sentence."""
    word = text.split()[0].rstrip(".,:;")
    return bool(re.fullmatch(r"[A-Z][a-z-]+s", word)) and word not in PLURALS


def is_a_sentence(text: str) -> bool:
    """Says whether the first sentence has a verb behind its subject, outside its relative clauses."""
    first = re.split(r"(?<!Eq\.)(?<=[.!?]) |, (?:that|which|who|where)\b| (?:that|which|who|where|whose)\b", text)[0]
    return re.search(rf"^\S.* ({VERBS})\b", first) is not None


def files(*folders: str) -> list:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def no_sentences(source: str) -> list[str]:
    """Returns the docstrings that do not begin with a verb; modules and classes may also have a subject."""
    return [
        f"{name}: {text}"
        for name, node, text in docstrings(source)
        if not begins_with_a_verb(text) and (isinstance(node, Function) or not is_a_sentence(text))
    ]


@pytest.mark.parametrize("path", files("dapo", "workers"))
def test_docstrings_are_sentences(path):
    assert no_sentences(path.read_text()) == []


@pytest.mark.parametrize("path", files("tests"))
def test_docstrings_of_tests_do_not_begin_with_a_preposition(path):
    found = list(docstrings(path.read_text()))
    assert [f"{name}: {text}" for name, _, text in found if begins_with_a_preposition(text)] == []


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


def test_what_is_no_sentence_is_seen_wherever_it_stands():
    source = (
        '"""Reads rows."""\nclass A:\n    """Of one."""\n    async def f(self):\n        """The tokens of a step."""\n'
    )
    assert no_sentences(source) == ["A: Of one.", "f: The tokens of a step."]
    assert no_sentences('class B:\n    """A term is one summand."""\n') == []
    assert no_sentences('class C:\n    """A term that is one summand."""\n') != []
    assert no_sentences('def f():\n    """A term is one summand."""\n') != [], "a function says what it does"


def references(texts: dict[str, str]) -> list[str]:
    """Lines that name the absent document."""
    return [
        f"{name}:{number}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(rf"\b{ABSENT}\b", line)
    ]


def tracked_texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    texts = {}
    for name in filter(None, listed.stdout.split("\0")):
        try:
            texts[name] = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a picture, a model, or a file that is being removed
    return texts


def test_nothing_refers_to_a_document_that_is_not_here():
    assert references(tracked_texts()) == []


def test_the_reference_check_sees_one():
    assert references({"a.py": f'"""Packs ({ABSENT} section 7)."""', "b.md": "designed, redesign"}) == ["a.py:1"]
    assert "README.md" in tracked_texts()


def missing_paths(readme: str, text: str) -> list[str]:
    """Links to files, from the folder of the README, and paths in backticks, from the root, that do not exist."""
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:dapo|workers|config|launch|docker|tests|\.github|\.ci)/[\w./-]*)`", text)
    found = [link for link in links if link and not (ROOT / readme).parent.joinpath(link).exists()]
    return found + [path for path in named if not (ROOT / path).exists()]


def test_readmes_refer_to_what_is_there():
    readmes = {name: text for name, text in tracked_texts().items() if name.endswith(".md")}
    assert "dapo/README.md" in readmes
    assert {name: missing_paths(name, text) for name, text in readmes.items() if missing_paths(name, text)} == {}


def test_the_check_of_paths_sees_each_kind():
    text = "[a](dapo/none.md) [b](https://example.org/x) [c](dapo/README.md#metrics) `dapo/none.py` `dapo/types.py`"
    assert missing_paths("README.md", text) == ["dapo/none.md", "dapo/none.py"]
    assert missing_paths("dapo/README.md", "[d](types.py) [e](../README.md) [f](../none.md)") == ["../none.md"]
