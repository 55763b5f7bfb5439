"""`from dapo import train, evaluate, inspect`, and the command `dapo`."""

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import dapo
from dapo.api import _arguments
from dapo.config.compose import compose
from dapo.rewards.as_file import file_of
from tests.support.results.run_files import step_line, store_starts, write_run

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import math as maths, re
from json import loads as read
from pathlib import Path

LAST = re.compile(r"Answer: (\\d+)", re.I)
SCORES, FOLDER = {True: 1.0, False: -1.0}, Path(".")

def number(text):
    return maths.floor(read(found[-1])) if (found := LAST.findall(text)) else None

def right(data_source, solution_str, ground_truth, extra_info=None):
    return SCORES[str(number(solution_str)) == ground_truth]

def on_disk(data_source, solution_str, ground_truth, extra_info=None):
    return float((FOLDER / solution_str).exists())

def inner():
    limit = 3
    def inside(data_source, solution_str, ground_truth, extra_info=None):
        return float(len(solution_str) < limit)
    return inside
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of SCRIPT, as a program that runs has them."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location("__main__", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "__main__", module)
    spec.loader.exec_module(module)
    return vars(module)


def test_a_function_of_a_script_becomes_a_file_with_all_that_it_uses(script: dict[str, Any], tmp_path: Path) -> None:
    path = file_of(script["right"], tmp_path / "functions")
    assert path == file_of(script["right"], tmp_path / "functions")
    spec = importlib.util.spec_from_file_location("reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [module.right("", text, "42") for text in ("so answer: 42", "Answer: 4", "")] == [1.0, -1.0, -1.0]
    assert file_of(write_run, tmp_path) == ROOT / "tests/support/results/run_files.py", "a module has its file"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda script: script["on_disk"], "on_disk uses FOLDER (PosixPath)"),
        (lambda script: script["inner"](), "inside: a lambda or inner function"),
        (lambda script: eval("lambda *texts: 1.0", script), "<lambda>: a lambda or inner function"),
    ],
    ids=["global", "inner", "lambda"],
)
def test_what_no_file_can_hold_is_refused(
    script: dict[str, Any], tmp_path: Path, function: Callable[[dict[str, Any]], Any], says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        file_of(function(script), tmp_path)


def test_values_of_python_are_those_of_the_command_line() -> None:
    entry = {"path": "a b=c.py", "weight": 0.5, "kwargs": {"words": ["it's", 'a "word"'], "deep": {"on": True}}}
    cfg = compose(_arguments({"trainer": {"seed": 3}, "reward.functions": [entry], "data.val_files": []}), "dapo_tiny")
    (function,) = cfg.reward.functions
    assert (cfg.trainer.seed, cfg.data.val_files) == (3, [])
    assert {name: getattr(function, name) for name in entry} == entry


def test_a_run_is_read_as_frames(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [{"step": 0, "eval/accuracy": 0.5}, *(step_line(n, 0.1 * n) for n in (1, 2))])
    store_starts(Path(path), ((1, 2), True, 0)).close()
    run = dapo.inspect(path)
    assert run.metrics.index.tolist() == [0, 1, 2] and run.metrics["eval/accuracy"][0] == 0.5
    assert math.isnan(run.metrics["eval/accuracy"][2]) and run.checkpoint is None
    assert run.samples["step"].tolist() == [1, 1, 2, 2] and "2 of" in repr(run)
    with pytest.raises(ValueError, match="is no run"):
        dapo.inspect(tmp_path)


def test_wrong_input_and_a_failed_run_are_exceptions_with_the_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean `trainer.total_steps`"):
        dapo.train("dapo_tiny", trainer={"total_step": 5})
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"^`trainer.output_dir` .*file"):
        dapo.train("dapo_tiny", trainer={"output_dir": str(tmp_path / "file")})


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 0, "  inspect "),
        (["--version"], 0, f"dapo {dapo.__version__}"),
        (["trian"], 1, "did you mean `train`?"),
        (["train", "--cfg", "job", "+experiment=dapo_tiny"], 0, "train_batch_size: 16"),
    ],
)
def test_the_command(arguments: list[str], code: int, says: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dapo", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and says in done.stdout + done.stderr, done.stderr


@pytest.mark.nightly
@pytest.mark.ray
def test_the_notebook(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "dapo/tiny/quickstart.ipynb", as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "committed without outputs"
        cell.source = cell.source.replace('"total_steps": 20', '"total_steps": 2')
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "outputs").is_dir()


INTERRUPTED = """
from dapo import train
try:
    train("dapo_tiny", trainer={"total_steps": 50, "output_dir": "run"})
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.nightly
@pytest.mark.ray
def test_ctrl_c_saves_and_reaches_the_script(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while not (line := child.stdout.readline()).startswith("step 2/"):
        assert line, "it ended before its second step"
    child.send_signal(signal.SIGINT)
    assert child.stdout.read().splitlines()[-1] == "interrupted" and child.wait(60) == 0
    assert dapo.inspect(tmp_path / "run").checkpoint is not None
