"""What a run survives and its person should know is warned of when its data is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dapo.config.compose import compose
from dapo.config.paths import resolve_path
from dapo.driver.run import load_data
from tests.data.test_prompts import row, write_jsonl

SUMS = [row(f"{number}+1=", str(number + 1)) for number in range(16)]
MARKED = row("<|user|>7+7=<|end|><|assistant|>", "14")


def rows(*added: dict[str, object], held_out: bool = False) -> Callable[[Path], list[str]]:
    def plant(folder: Path) -> list[str]:
        name = write_jsonl(folder / "a.jsonl", [*SUMS, *added])
        return [f"data.train_files=[{name}]", f"data.val_files=[{name if held_out else ''}]"]

    return plant


def template(change: Callable[[str], str]) -> Callable[[Path], list[str]]:
    def plant(folder: Path) -> list[str]:
        file = Path(shutil.copytree(resolve_path("pkg://dapo.tiny/base"), folder / "model")) / "chat_template.jinja"
        file.write_text(change(file.read_text()))
        return [*rows()(folder), f"model.path={folder / 'model'}"]

    return plant


def vocabulary(folder: Path) -> list[str]:
    given = template(str)(folder)
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 200}))
    return given


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (rows(), None),
        (rows(held_out=True), "16 held-out problems are training prompts too"),
        (rows(row("7+7=", "None")), "math: 16 of 17 reference answers as they should be: row 16: 'None'"),
        (rows(row("7+7=", "proof")), "math: the ground truth 'proof' of 1 of 17 rows, the first 16, is no answer"),
        (rows(MARKED), "1 prompts have special tokens of the model in their messages ('<|"),
        (template(lambda text: "{{ strftime_now('%d %b') }}" + text), "the chat template writes today's date"),
        (template(lambda text: "{{ messages[0]['content'] }}"), "nothing opens the model's turn"),
        (vocabulary, "has 264 tokens, and the model's embedding 200 rows"),
    ],
)
def test_what_spoils_a_run_in_silence_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plant: Callable[[Path], list[str]], said: str | None
) -> None:
    cfg = compose([*plant(tmp_path), "data.max_prompt_length=24"], "dapo_tiny")
    cfg.model.path = resolve_path(cfg.model.path)
    load_data(cfg)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if said is None or said not in line] == []
    assert bool(lines) == bool(said)
