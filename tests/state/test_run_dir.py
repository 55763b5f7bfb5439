"""Claiming an output directory: who may have it, who is refused, and in which words."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo.state.run_dir import RunDirectory, claim_output_dir

CONFIG: dict[str, Any] = {
    "model": {"path": "pkg://dapo.tiny/base"},
    "data": {"train_files": ["a.parquet"], "max_prompt_length": 64, "shuffle": True},
    "rollout": {"n": 16, "num_engines": 1},
    "actor": {"num_workers": 2, "optim": {"lr": 1e-6}},
    "trainer": {"seed": 0, "total_steps": 10},
}


def changed(key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    *parents, name = key.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    section[name] = value
    return config


def claim(path: Path, config: dict[str, Any] = CONFIG, resume: str = "auto") -> RunDirectory:
    return claim_output_dir(str(path), resume, config)


def run_some_steps(path: Path) -> None:
    claim(path).release()
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    (path / "checkpoints" / "step_000001").mkdir(parents=True)


def test_a_new_directory_gets_the_configuration(tmp_path: Path) -> None:
    run = claim(tmp_path / "a" / "b", resume="never")
    assert run.path == tmp_path / "a" / "b" and run.checkpoints == run.path / "checkpoints"
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == CONFIG


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("trainer.total_steps", 20, id="more-steps"),
        pytest.param("actor.num_workers", 1, id="other-world-size"),
        pytest.param("actor.optim.lr", 1e-5, id="other-learning-rate"),
    ],
)
def test_a_run_is_continued_with_what_may_differ(key: str, value: Any, tmp_path: Path) -> None:
    run_some_steps(tmp_path)
    config = changed(key, value)
    claim(tmp_path, config)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("model.path", "other", id="model"),
        pytest.param("data.train_files", ["b.parquet"], id="files"),
        pytest.param("data.max_prompt_length", 32, id="prompt-length"),
        pytest.param("data.shuffle", False, id="shuffle"),
        pytest.param("rollout.n", 8, id="n"),
        pytest.param("trainer.seed", 1, id="seed"),
    ],
)
def test_another_run_is_refused_with_both_values(key: str, value: Any, tmp_path: Path) -> None:
    run_some_steps(tmp_path)
    before = (tmp_path / "config.yaml").read_text()
    section, name = key.split(".")
    with pytest.raises(ValueError, match="holds another run") as error:
        claim(tmp_path, changed(key, value))
    assert f"`{key}` is {CONFIG[section][name]!r} there and {value!r} here" in str(error.value)
    assert "give another `trainer.output_dir`" in str(error.value)
    assert (tmp_path / "config.yaml").read_text() == before
    claim(tmp_path)  # a refusal holds no lock


def test_never_refuses_a_run_even_if_it_agrees(tmp_path: Path) -> None:
    run_some_steps(tmp_path)
    with pytest.raises(ValueError, match="holds a run and `checkpoint.resume` is never"):
        claim(tmp_path, resume="never")


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_that_got_nowhere_is_taken_over(resume: str, tmp_path: Path) -> None:
    claim(tmp_path).release()
    (tmp_path / "metrics.jsonl").touch()
    claim(tmp_path, changed("trainer.seed", 1), resume)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["seed"] == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("thesis.tex", "x", id="some-file"),
        pytest.param("config.yaml", "model: mine\n", id="config-of-something-else"),
        pytest.param("metrics.jsonl", "{}\n", id="metrics-alone"),
    ],
)
def test_somebody_elses_directory_is_left_alone(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"is not empty .{name}. and holds no config.yaml of a dapo run"):
        claim(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, content)]


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"`trainer.output_dir` .{tmp_path}/file. cannot be used"):
        claim(tmp_path / "file")


def test_a_damaged_configuration(tmp_path: Path) -> None:
    run_some_steps(tmp_path)
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("{ [")
    with pytest.raises(ValueError, match="whose config.yaml cannot be read"):
        claim(tmp_path)


def test_two_live_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    run = claim(tmp_path)
    with pytest.raises(ValueError, match=r"is in use by a live run \(process \d+ on .+\)"):
        claim(tmp_path)
    run.release()
    claim(tmp_path).release()


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    code = (
        "import os, sys; from dapo.state.run_dir import claim_output_dir; "
        "held = claim_output_dir(sys.argv[1], 'auto', {}); print('held', flush=True); sys.stdin.read(); os._exit(9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"in use by a live run .process {holder.pid} "):
            claim(tmp_path)
        holder.kill()
        holder.wait(timeout=30)
    claim(tmp_path)


def test_other_prompts_are_refused_once_there_are_steps(tmp_path: Path) -> None:
    run = claim(tmp_path)
    run.check_data("aaaa")
    run.check_data("bbbb")
    run.release()
    run_some_steps(tmp_path)
    run = claim(tmp_path)
    run.check_data("bbbb")
    with pytest.raises(ValueError, match=r"`data.train_files` gives other prompts \(fingerprint aaaa\).*\(bbbb\)"):
        run.check_data("aaaa")


WARN = """
import sys
import dapo.state.checkpoint, dapo.main_ppo
def launch(cfg):
    dapo.state.checkpoint.log.warning("skipping a broken checkpoint")
dapo.main_ppo.launch = launch
sys.argv[1:] = ["+experiment=dapo_tiny"]
dapo.main_ppo.main()
"""


def test_warnings_reach_the_person_who_started_the_program():
    """Hydra's own logging set-up would mute the loggers that exist before it."""
    done = subprocess.run([sys.executable, "-c", WARN], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "skipping a broken checkpoint\n")
