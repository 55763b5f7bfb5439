"""Claiming an output directory: who may have it, who is refused, and in which words."""

import copy
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo.state.changes import value_of
from dapo.state.run_dir import claim_output_dir
from tests.support.state.claims import CONFIG, claim, save


def changed(**keys: Any) -> dict[str, Any]:
    """CONFIG with other values, `section__key=value`."""
    config = copy.deepcopy(CONFIG)
    for key, value in keys.items():
        section = config
        *parents, name = key.split("__")
        for parent in parents:
            section = section[parent]
        section[name] = value
    return config


ACCEPTED = changed(rollout__n=8, checkpoint__accept_changes=["rollout.n"])


def some_steps(path: Path) -> None:
    with claim(path) as run:
        save(run, 1)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')


def recorded(path: Path) -> dict[str, Any]:
    return yaml.safe_load((path / "config.yaml").read_text())


def test_a_new_directory_gets_the_configuration(tmp_path):
    run = claim(tmp_path / "a" / "b", resume="never")
    assert run.path == tmp_path / "a" / "b" and run.checkpoints == run.path / "checkpoints"
    assert recorded(run.path) == CONFIG
    (path, one), (_, two) = run.token(), run.token()
    assert one != two == Path(path).read_text()


def test_a_refused_start_removes_only_the_folders_that_it_has_made(tmp_path):
    def refuse(path: Path, *, begun: bool = False) -> None:
        with pytest.raises(KeyError), claim_output_dir(str(path), "auto", CONFIG) as run:
            run.token()
            if begun:
                run.begin()
            raise KeyError

    refuse(tmp_path / "a" / "b" / "c")
    assert not any(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    refuse(tmp_path / "a" / "b" / "c")
    assert not any((tmp_path / "a").iterdir())
    refuse(tmp_path / "a")
    refuse(tmp_path / "b", begun=True)
    assert (tmp_path / "a" / "config.yaml").exists() and (tmp_path / "b" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("trainer.total_steps", 20), ("actor.num_workers", 1), ("actor.optim.lr", 1e-5)]
)
def test_a_run_is_continued_with_what_may_differ(key, value, tmp_path):
    some_steps(tmp_path)
    config = changed(**{key.replace(".", "__"): value})
    with claim(tmp_path, config) as run:
        before = value_of(CONFIG, key)
        assert run.notices == [f"changed since the last checkpoint: {key} {before!r} → {value!r}"]
        assert run.accepted == []
    assert recorded(tmp_path) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.path", "other"),
        ("data.train_files", ["b.parquet"]),
        ("data.shuffle", False),
        ("rollout.n", 8),
        ("rollout.temperature", 0.9),
        ("trainer.seed", 1),
    ],
)
def test_another_run_is_refused_with_both_values(key, value, tmp_path):
    some_steps(tmp_path)
    with pytest.raises(ValueError, match="holds another run") as error:
        claim(tmp_path, changed(**{key.replace(".", "__"): value}))
    assert f"`{key}` is {value_of(CONFIG, key)!r} there and {value!r} here" in str(error.value)
    assert "give another `trainer.output_dir`" in str(error.value)
    assert f"checkpoint.accept_changes=[{key}]" in str(error.value)
    assert recorded(tmp_path) == CONFIG
    claim(tmp_path).release()  # a refusal holds no lock
    with pytest.raises(ValueError, match="holds a run and `checkpoint.resume` is never"):
        claim(tmp_path, resume="never")


def test_groups_of_a_journal_alone_are_a_run(tmp_path):
    claim(tmp_path).release()
    (tmp_path / "journal").mkdir()
    segment = tmp_path / "journal" / "after_000000.log"
    segment.touch()
    with claim(tmp_path, CONFIG, resume="never") as run:
        run.check_data("of its prompts")
    segment.write_bytes(b"a group")
    with pytest.raises(ValueError, match="holds a run and `checkpoint.resume` is never"):
        claim(tmp_path, resume="never")
    with pytest.raises(ValueError, match="`rollout.n` is 16 there and 8 here"):
        claim(tmp_path, changed(rollout__n=8))
    with claim(tmp_path, ACCEPTED) as run:
        assert run.accepted == ["rollout.n"] and not segment.exists(), "its groups are not taken over"
        segment.write_bytes(b"a group that has eight")
    with claim(tmp_path, changed(rollout__n=8)) as run:
        with pytest.raises(ValueError, match="`data.train_files` gives other prompts"):
            run.check_data("of others")


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_that_got_nowhere_is_taken_over(resume, tmp_path):
    claim(tmp_path).release()
    (tmp_path / "metrics.jsonl").touch()
    claim(tmp_path, changed(trainer__seed=1), resume)
    assert recorded(tmp_path)["trainer"]["seed"] == 1


@pytest.mark.parametrize(
    ("name", "content"), [("thesis.tex", "x"), ("config.yaml", "model: mine\n"), ("metrics.jsonl", "{}\n")]
)
def test_somebody_elses_directory_is_left_alone(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"is not empty .{name}. and holds no config.yaml of a dapo run"):
        claim(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, content)]
    with pytest.raises(ValueError, match=f"`trainer.output_dir` .{tmp_path}/{name}. cannot be used"):
        claim(tmp_path / name)


@pytest.mark.parametrize(
    "name", [".lock", ".lease.0123", ".config.yaml.tmp", "started", ".started.tmp", "evaluation_001.json", "nodes/7.0"]
)
def test_what_may_be_there_before_a_run(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("2026-11-22T13:45:00" if name == "started" else "")
    claim(tmp_path).release()


def test_a_damaged_configuration_is_written_again_where_a_checkpoint_has_it(tmp_path):
    some_steps(tmp_path / "run")
    claim(tmp_path / "no checkpoint").release()
    (tmp_path / "no checkpoint" / "metrics.jsonl").write_text('{"step": 1}\n')
    for path in tmp_path.iterdir():
        with (path / "config.yaml").open("a") as file:
            file.write("{ [")
    with pytest.raises(ValueError, match="whose config.yaml cannot be read"):
        claim(tmp_path / "no checkpoint")
    with pytest.raises(ValueError, match="`rollout.n` is 16 there and 8 here"):
        claim(tmp_path / "run", changed(rollout__n=8))
    claim(tmp_path / "run").release()
    assert recorded(tmp_path / "run") == CONFIG


def test_other_prompts_are_refused_once_there_are_steps(tmp_path):
    with claim(tmp_path) as run:
        run.check_data("aaaa")
        run.check_data("bbbb")
        save(run, 1)
    with claim(tmp_path) as run:
        run.check_data("bbbb")
        assert run.accepted == []
        with pytest.raises(ValueError, match=r"`data.train_files` gives other prompts \(fingerprint aaaa\).*\(bbbb\)"):
            run.check_data("aaaa")
    with claim(tmp_path, changed(checkpoint__accept_changes=["data"])) as run:
        run.check_data("aaaa")
        assert run.accepted == ["data.train_files"]


def test_an_accepted_change_is_known_until_a_checkpoint_holds_it(tmp_path):
    some_steps(tmp_path)
    for _ in range(2):
        with claim(tmp_path, ACCEPTED) as run:
            assert run.accepted == ["rollout.n"]
            assert "rollout.n 16 → 8" in run.notices[0]
    with claim(tmp_path, ACCEPTED) as run:
        save(run, 2)
    with claim(tmp_path, ACCEPTED) as run:
        assert run.accepted == [] and run.notices == []
    with pytest.raises(ValueError, match="`rollout.n` is 8 there and 16 here"):
        claim(tmp_path)
    with pytest.raises(ValueError, match=r"accept_changes` names `rollout.m`, which is no key; did you"):
        claim(tmp_path, changed(checkpoint__accept_changes=["rollout", "rollout.n", "rollout.m"]))


def test_the_date_of_the_first_start_stays(tmp_path):
    with claim(tmp_path) as run:
        assert abs((datetime.now() - run.started).total_seconds()) < 600
    (tmp_path / "started").write_text("2020-02-03T04:05:06\n")
    with claim(tmp_path) as run:
        save(run, 1)
    (tmp_path / "started").unlink()
    with claim(tmp_path) as run:
        assert run.started == datetime(2020, 2, 3, 4, 5, 6)


def test_a_left_over_is_recovered_before_the_run_looks_for_its_checkpoint(tmp_path):
    some_steps(tmp_path)
    (tmp_path / "checkpoints" / "step_000001").rename(tmp_path / "checkpoints" / "step_000001.0badcafe.tmp")
    with pytest.raises(ValueError, match="never"):
        claim(tmp_path, resume="never")
    with claim(tmp_path) as run:
        assert run.store.latest() == run.checkpoints / "step_000001"


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a dangling link"])
@pytest.mark.parametrize("resume", ["auto", "origin"])
def test_checkpoints_that_are_not_there_are_no_new_start(left, resume, tmp_path):
    """Their disk is not mounted, or somebody has removed them: records and the checkpoints themselves would go."""
    with claim(tmp_path / "origin") as other:
        save(other, 7)
    from_origin = str(other.checkpoints / "step_000007")
    resume = from_origin if resume == "origin" else resume
    config = {**CONFIG, "checkpoint": {**CONFIG["checkpoint"], "resume": resume}}
    with claim(tmp_path / "run", config, resume) as run:
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
        save(run, 1)
        save(run, 2)
    disk = run.checkpoints.rename(tmp_path / "disk")
    if left == "an empty folder":
        run.checkpoints.mkdir()
    elif left == "a dangling link":
        run.checkpoints.symlink_to(tmp_path / "not mounted")
    with pytest.raises(ValueError, match="checkpoints, the last one of step 2, .*holds none; is its disk mounted?"):
        claim(run.path, config, resume)
    if run.checkpoints.is_symlink():
        run.checkpoints.unlink()
    elif run.checkpoints.exists():
        run.checkpoints.rmdir()
    disk.rename(run.checkpoints)
    with claim(run.path, config, resume) as again:
        assert again.store.latest() == run.checkpoints / "step_000002"
