"""Claiming an output directory: who may have it, who is refused, and in which words."""

import copy
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.state.claims import CONFIG, claim, save


def changed(key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    *parents, name = key.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    section[name] = value
    return config


def run_some_steps(path: Path) -> None:
    run = claim(path)
    save(run, 1)
    run.release()
    (path / "metrics.jsonl").write_text('{"step": 1}\n')


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
    with claim(tmp_path, config) as run:
        [notice] = run.notices
    section = CONFIG
    for part in key.split("."):
        section = section[part]
    assert notice == f"changed since the last checkpoint: {key} {section!r} → {value!r}" and run.accepted == []
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("model.path", "other", id="model"),
        pytest.param("data.train_files", ["b.parquet"], id="files"),
        pytest.param("data.max_prompt_length", 32, id="prompt-length"),
        pytest.param("data.shuffle", False, id="shuffle"),
        pytest.param("rollout.n", 8, id="n"),
        pytest.param("rollout.temperature", 0.9, id="temperature"),
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
    assert f"checkpoint.accept_changes=[{key}]" in str(error.value)
    assert (tmp_path / "config.yaml").read_text() == before
    claim(tmp_path)  # a refusal holds no lock


def test_never_refuses_a_run_even_if_it_agrees(tmp_path: Path) -> None:
    run_some_steps(tmp_path)
    with pytest.raises(ValueError, match="holds a run and `checkpoint.resume` is never"):
        claim(tmp_path, resume="never")


def test_groups_of_a_journal_alone_are_a_run(tmp_path: Path) -> None:
    """Killed before its first checkpoint and line of metrics, it has generated for hours perhaps."""
    claim(tmp_path).release()
    (tmp_path / "journal").mkdir()
    segment = tmp_path / "journal" / "after_000000.log"
    segment.touch()
    with claim(tmp_path, changed("rollout.n", 16), resume="never") as run:
        run.check_data("of its prompts")
    segment.write_bytes(b"a group")
    with pytest.raises(ValueError, match="holds a run and `checkpoint.resume` is never"):
        claim(tmp_path, resume="never")
    with pytest.raises(ValueError, match="`rollout.n` is 16 there and 8 here"):
        claim(tmp_path, changed("rollout.n", 8))
    config = changed("rollout.n", 8)
    config["checkpoint"]["accept_changes"] = ["rollout.n"]
    with claim(tmp_path, config) as run:
        assert run.accepted == ["rollout.n"], "its groups are not taken over"
    with claim(tmp_path, changed("trainer.total_steps", 20) | {"rollout": config["rollout"]}) as run:
        with pytest.raises(ValueError, match="`data.train_files` gives other prompts"):
            run.check_data("of others")


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


def test_logs_of_a_launcher_are_there_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "nodes/7.0").mkdir(parents=True)
    claim(tmp_path).release()


def test_an_evaluation_may_come_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "evaluation_001.json").write_text("{}")
    claim(tmp_path).release()


@pytest.mark.parametrize("name", [".lock", ".lease", ".lease.0123", ".config.yaml.tmp", "started", ".started.tmp"])
def test_what_a_crash_in_the_first_second_leaves_is_ours(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("2026-11-22T13:45:00" if name == "started" else "")
    if name == ".lease":
        (tmp_path / name).unlink()
    claim(tmp_path).release()


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"`trainer.output_dir` .{tmp_path}/file. cannot be used"):
        claim(tmp_path / "file")


def test_a_damaged_configuration(tmp_path: Path) -> None:
    claim(tmp_path).release()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("{ [")
    with pytest.raises(ValueError, match="whose config.yaml cannot be read"):
        claim(tmp_path)


def test_a_damaged_configuration_is_written_again_where_a_checkpoint_has_it(tmp_path: Path) -> None:
    run_some_steps(tmp_path)
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("{ [")
    with pytest.raises(ValueError, match="`rollout.n` is 16 there and 8 here"):
        claim(tmp_path, changed("rollout.n", 8))
    claim(tmp_path).release()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == CONFIG


def test_other_prompts_are_refused_once_there_are_steps(tmp_path: Path) -> None:
    run = claim(tmp_path)
    run.check_data("aaaa")
    run.check_data("bbbb")
    save(run, 1)
    run.release()
    run = claim(tmp_path)
    run.check_data("bbbb")
    assert run.accepted == []
    with pytest.raises(ValueError, match=r"`data.train_files` gives other prompts \(fingerprint aaaa\).*\(bbbb\)"):
        run.check_data("aaaa")

    run.release()
    run = claim(tmp_path, changed("checkpoint.accept_changes", ["data"]))
    run.check_data("aaaa")
    assert run.accepted == ["data.train_files"]


def test_an_accepted_change_is_known_until_a_checkpoint_holds_it(tmp_path: Path) -> None:
    """Groups that wait in the checkpoint were sampled before it, however often the run is killed and started."""
    run_some_steps(tmp_path)
    config = changed("rollout.n", 8)
    config["checkpoint"]["accept_changes"] = ["rollout.n"]
    for _ in range(2):
        with claim(tmp_path, config) as run:
            assert run.accepted == ["rollout.n"]
            assert "rollout.n 16 → 8" in run.notices[0]
    with claim(tmp_path, config) as run:
        save(run, 2)
    with claim(tmp_path, config) as run:
        assert run.accepted == [] and run.notices == []
    with pytest.raises(ValueError, match="`rollout.n` is 8 there and 16 here"):
        claim(tmp_path)


def test_what_is_accepted_must_be_a_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="accept_changes` names `rollout.m`, which is no key"):
        claim(tmp_path, changed("checkpoint.accept_changes", ["rollout.m"]))


def test_the_date_of_the_first_start_stays(tmp_path: Path) -> None:
    with claim(tmp_path) as run:
        assert abs((datetime.now() - run.started).total_seconds()) < 600
    (tmp_path / "started").write_text("2020-02-03T04:05:06\n")
    with claim(tmp_path) as run:
        save(run, 1)
    (tmp_path / "started").unlink()
    with claim(tmp_path) as run:
        assert run.started == datetime(2020, 2, 3, 4, 5, 6)


def test_a_token_is_new_each_time(tmp_path: Path) -> None:
    with claim(tmp_path) as run:
        one, two = run.token(), run.token()
    assert one[0] == two[0] and one[1] != two[1] and Path(two[0]).read_text() == two[1]
    claim(tmp_path).release()


def test_a_left_over_is_recovered_before_the_run_looks_for_its_checkpoint(tmp_path: Path) -> None:
    run_some_steps(tmp_path)
    (tmp_path / "checkpoints" / "step_000001").rename(tmp_path / "checkpoints" / "step_000001.0badcafe.tmp")
    with pytest.raises(ValueError, match="never"):
        claim(tmp_path, resume="never")
    with claim(tmp_path) as run:
        assert run.store.latest() == run.checkpoints / "step_000001"


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
