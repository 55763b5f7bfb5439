"""What holds for all files: no text run as a program, README links that exist, README commands that are accepted."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dapo.__main__ import COMMANDS
from dapo.config.compose import compose
from dapo.config.names import experiments
from dapo.tools import compare
from dapo.tools.ablation import __main__ as ablation
from dapo.tools.inspect import __main__ as inspect
from dapo.tools.replay import __main__ as replay
from dapo.tools.simulate import __main__ as simulate
from tests.support.costs import table
from tests.support.source import tree

ROOT = Path(__file__).resolve().parents[2]
BANNED = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr"}  # `model.eval()` of torch is another
ABSENT = "DES" + "IGN"  # in two parts, or this file would hold the word itself
STARTS = (
    "dapo ",
    "python -m dapo",
    "bash ",
    "pytest ",
    "sbatch ",
    "scancel ",
    "ray ",
    "kubectl ",
    "python launch/",
    "docker ",
    ".venv/bin/",
    ".ci/",
)
PARSERS = {
    "python -m dapo.simulate ": lambda words: simulate.parser().parse_args(words),
    "python -m dapo.ablation ": ablation.parse,
    "python -m dapo.inspect ": lambda words: inspect.parse(words),
    "python -m dapo.replay ": lambda words: replay.parser().parse_intermixed_args(
        ["1" if word == "N" else word for word in words]
    ),
    "python -m dapo.compare ": lambda words: compare.parser().parse_args(words),
}


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


def test_nothing_runs_text_as_a_program():
    files = [path for folder in ("dapo", "workers") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): banned(path.read_text()) for path in files}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "line",
    ["run = exec", "import builtins as b; b.eval('1')", "import sympy; sympy.sympify('1')", "from pickle import loads"]
    + ["import pickle; pickle.loads(b'')", "torch.load(f, weights_only=False)", "subprocess.run('ls', shell=True)"],
)
def test_the_ban_sees_each_spelling(line):
    assert banned(line)


def tracked_texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    texts = {}
    for name in filter(None, listed.stdout.split("\0")):
        try:
            texts[name] = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # a picture, a model, a file that is being removed, or the link dapo/workers
    return texts


def test_nothing_refers_to_a_document_that_is_not_here():
    assert [name for name, text in tracked_texts().items() if re.search(rf"\b{ABSENT}\b", text)] == []


def missing_paths(readme: str, text: str) -> list[str]:
    """Links to files, from the folder of the README, and paths in backticks, from the root, that do not exist."""
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:dapo|workers|config|launch|docker|tests|\.github|\.ci)/[\w./-]*)`", text)
    found = [link for link in links if link and not (ROOT / readme).parent.joinpath(link).exists()]
    return found + [path for path in named if not (ROOT / path).exists()]


def test_readmes_refer_to_what_is_there():
    readmes = {name: text for name, text in tracked_texts().items() if name.endswith(".md")}
    assert {name: missing_paths(name, text) for name, text in readmes.items() if missing_paths(name, text)} == {}
    assert missing_paths("README.md", "[a](none.md) `dapo/none.py` `dapo/types.py`") == ["none.md", "dapo/none.py"]


def test_links_and_anchors_of_the_site_hold(tmp_path: Path) -> None:
    """mkdocs also finds a page that the navigation lacks. It reads tracked files alone."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "launch" / "cloud.yaml").is_file()


def commands_of(readme: str) -> list[str]:
    """Lines of code blocks, joined where they end with a backslash, and `spans` of text; comments are left out."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines()]
    text = re.sub(r"^```.*?^```", "", readme, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    parts = [part.split("  #")[0].split(" # ")[0].strip() for line in lines for part in line.split(" && ")]
    return [as_module(part) for part in parts if part.startswith(STARTS)]


def as_module(command: str) -> str:
    """`dapo train dapo_tiny` as `python -m dapo.main_ppo +experiment=dapo_tiny`."""
    first, name, *rest = f"{command} ".split(" ", 2)
    if first != "dapo" or name not in COMMANDS:
        return command
    words = [f"+experiment={word}" if word in experiments() else word for word in rest[0].strip().split(" ")]
    module = COMMANDS[name][0].removeprefix("tools.")
    return " ".join([f"python -m dapo.{module}", *words]).strip()


def readme_commands() -> list[str]:
    readmes = [text for name, text in tracked_texts().items() if name.endswith("README.md")]
    return sorted({command for text in readmes for command in commands_of(text)})


def overrides_of(command: str) -> list[str]:
    """Hydra's arguments, wherever in a command they stand; a placeholder (NAME, …) is none."""
    words = [word for word in shlex.split(command) if re.match(r"\+?\+?[a-z][\w.]*=", word)]
    return [word for word in words if word != "key=value" and not re.search(r"=[A-Z.]+$", word)]


def test_commands_are_found():
    readme = "a\n```bash\nray job submit \\\n  -- a  # why\nls\n```\nrun `python -m dapo.plan\n+experiment=a`, `x`"
    assert commands_of(readme) == ["ray job submit -- a", "python -m dapo.plan +experiment=a"]
    assert commands_of("`dapo train dapo_tiny a=1`") == ["python -m dapo.main_ppo +experiment=dapo_tiny a=1"]


def test_configurations_in_readmes_compose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text("def compute_score(*_):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    given = [overrides_of(command) for command in readme_commands() if "--config-dir" not in command]
    assert len([each for each in given if each]) > 10
    for overrides in given:
        named = any(word.startswith("+experiment=") for word in overrides)
        compose(overrides if named else ["+experiment=dapo_tiny", *overrides])


def test_options_in_readmes_are_known() -> None:
    for program, parse in PARSERS.items():
        commands = [command for command in readme_commands() if command.startswith(program)]
        assert commands, program
        for command in commands:
            words = shlex.split(command.removeprefix(program))
            if "--help" not in words:
                parse(words)


def test_the_table_of_costs_adds_up_files(tmp_path: Path) -> None:
    cases = [("tests.a.test_x", 1.4), ("tests.b.test_y", 3.0), ("tests.a.test_x", 2.2)]
    rows = "".join(f'<testcase classname="{name}" name="t" time="{seconds}"/>' for name, seconds in cases)
    (tmp_path / "results.xml").write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    assert table(str(tmp_path / "results.xml")).splitlines()[2:] == [
        "| `tests/a/test_x.py` | 2 | 4 |",
        "| `tests/b/test_y.py` | 1 | 3 |",
        "| all 2 files | 3 | 7 |",
    ]
