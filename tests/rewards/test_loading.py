"""How a reward function is found, by file or module, and what is said where none is found."""

import sys
from pathlib import Path

import pytest

from dapo.config.reward import RewardFunctionConfig
from dapo.rewards.calling.loading import load


@pytest.mark.parametrize(
    ("content", "name", "named"),
    [
        pytest.param(None, "f", ["reward.functions[3].path", "there is no such file", "absolute path"], id="no-file"),
        pytest.param("def (", "f", ["reward.functions[3].path", "SyntaxError"], id="syntax-error"),
        pytest.param("import no_such_thing", "f", ["path", "ModuleNotFoundError", "no_such_thing"], id="its-import"),
        pytest.param("1 / 0", "f", ["reward.functions[3].path", "ZeroDivisionError"], id="raises-at-import"),
        pytest.param("import sys; sys.exit(3)", "f", ["path", "SystemExit"], id="ends-itself-at-import"),
        pytest.param("def f(solution_str): pass", "f", ["[3]", "cannot be called", "data_source"], id="signature"),
        pytest.param("def score_it(): pass", "scoreit", ["[3].name", "'scoreit'", "mean score_it?"], id="near-name"),
        pytest.param("x = 1", "f", ["[3].name", "'f'", "it has none"], id="nothing-there"),
        pytest.param("f = 1", "f", ["reward.functions[3].name", "is no function"], id="not-callable"),
    ],
)
def test_loading_errors(tmp_path: Path, content: str | None, name: str, named: list[str]) -> None:
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError) as error:
        load(RewardFunctionConfig(path=str(file), name=name), index=3)
    assert all(part in str(error.value) for part in [*named, "mine.py"])


@pytest.mark.parametrize("line", ["from helper import RIGHT", "from .helper import RIGHT", "import helper.part"])
def test_a_file_cannot_import_its_neighbour_and_says_what_works(tmp_path: Path, line: str) -> None:
    (tmp_path / "helper.py").write_text("RIGHT = 1.0")
    (tmp_path / "mine.py").write_text(f"{line}\ndef f(**values): return 1.0")
    with pytest.raises(ValueError, match=r"mine.py'\) cannot .*The file's folder is not searched .* in PYTHONPATH"):
        load(RewardFunctionConfig(path=str(tmp_path / "mine.py"), name="f"))


def test_a_missing_module_is_named() -> None:
    with pytest.raises(ValueError, match=r"`reward.functions\[0\].path` \('no_such.module'\) cannot be imported"):
        load(RewardFunctionConfig(path="no_such.module", name="f"))


def test_a_file_shadows_no_module_and_may_define_dataclasses(tmp_path: Path) -> None:
    import json

    file = tmp_path / "json.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport math\n"
        "@dataclass\nclass Box:\n    value: float\n"
        "def f(**values):\n    return Box(math.sqrt(4)).value\n"
    )
    search_path = list(sys.path)
    function = load(RewardFunctionConfig(path=str(file), name="f")).call
    assert function() == 2.0
    assert sys.modules["json"] is json and sys.path == search_path
