"""`checkpoint.resume=PATH`: a new run from another one's checkpoint, or back to an earlier one of its own."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dapo.config.checks import validate
from dapo.config.compose import compose
from dapo.main_ppo import launch
from dapo.state.run_dir import RunDirectory, claim_output_dir
from tests.support.state.claims import names, write

CONFIG: dict[str, Any] = {"rollout": {"n": 16}, "trainer": {"seed": 0}, "checkpoint": {"keep": 0}}


def claim(
    path: Path, resume: Path | str = "auto", *, n: int = 16, accept: tuple[str, ...] = (), begin: bool = True, **other
) -> RunDirectory:
    checkpoint = {"keep": 0, "resume": str(resume), "accept_changes": list(accept)}
    run = claim_output_dir(str(path), str(resume), {**CONFIG, "rollout": {"n": n}, "checkpoint": checkpoint, **other})
    if begin:
        run.begin()
    return run


def save(run: RunDirectory, *steps: int) -> None:
    for step in steps:
        write(run.store, step, {"weights": f"of step {step} in {run.path.name}"})


def weights(run: RunDirectory) -> str:
    found = run.store.latest()
    assert found is not None
    return (found / "weights").read_text()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The checkpoint of step 5 in a run that went on to step 10."""
    with claim(tmp_path / "other") as run:
        run.check_data("aaaa")
        (run.path / "started").write_text("2020-02-03T04:05:06\n")
        save(run, 5, 10)
    return tmp_path / "other" / "checkpoints" / "step_000005"


def test_a_new_run_starts_from_another_ones_checkpoint_and_continues_its_own(tmp_path, other):
    claim(tmp_path / "new").release()  # a start that got nowhere
    for _ in range(2):  # killed before its first checkpoint: the same command
        with claim(tmp_path / "new", other) as run:
            assert weights(run) == "of step 5 in other"
            assert run.store.completed(5) == other and run.store.completed(6) is None
            assert run.started.year == 2020, "its prompts are those of the other run, date included"
            run.check_data("aaaa")
            with pytest.raises(ValueError, match="gives other prompts"):
                run.check_data("bbbb")
    with claim(tmp_path / "new", other) as run:
        save(run, 6)
    assert names(other.parent) == ["LATEST", "step_000005", "step_000010"]
    other.rename(other.with_name("moved"))  # it is not needed any more
    with claim(tmp_path / "new", other) as run:
        assert weights(run) == "of step 6 in new" and "has gone on from there" in run.notices[0]
    with claim(tmp_path / "new") as run:
        assert weights(run) == "of step 6 in new"


def test_a_checkpoint_that_was_moved_alone_knows_its_configuration(tmp_path, other):
    alone = other.rename(tmp_path / "step_000005")
    with pytest.raises(ValueError, match="`rollout.n` is 16 there and 8 here"):
        claim(tmp_path / "new", alone, n=8)
    with claim(tmp_path / "new", alone, n=8, accept=("rollout",)) as run:
        assert weights(run) == "of step 5 in other" and run.accepted == ["rollout.n"]


@pytest.mark.parametrize("name", ["other", "link"])
def test_going_back_in_the_own_directory(name, tmp_path, other):
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with claim(tmp_path / name, other) as run:
        assert run.notices[0].endswith("going back to step 5; 1 later checkpoints are kept as left_*")
        assert (other.parent / "LATEST").read_text() == "step_000005\n"
    with claim(tmp_path / name, other) as run:
        assert weights(run) == "of step 5 in other"
        save(run, 6)
    with claim(tmp_path / name, other) as run:
        assert weights(run) == f"of step 6 in {name}"
    with claim(tmp_path / name) as run:
        assert weights(run) == f"of step 6 in {name}", "step 10 of the course that was left does not return"
    assert (other.with_name("left_000010") / "weights").exists()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"actor": {"optim": {"lr": 2e-6}}}, {"actor": {"optim": {"lr": 3e-6}}}, id="harmless"),
        pytest.param({"n": 8, "accept": ("rollout",)}, {"n": 4, "accept": ("rollout",)}, id="accepted"),
    ],
)
@pytest.mark.parametrize("own", [True, False], ids=["back", "from another run"])
def test_another_course_from_the_same_checkpoint_is_not_put_on_top_of_the_first(own, first, second, tmp_path, other):
    path = tmp_path / ("other" if own else "new")
    with claim(path, other, **first) as run:
        save(run, 6)
    with claim(path, other, **first, eval={"every": 7}) as run:  # a job that is started again, and what trains nothing
        assert weights(run).startswith("of step 6")
    with pytest.raises(ValueError) as refused:
        claim(path, other, **second)
    for words in ("has gone on from `checkpoint.resume`", "another `trainer.output_dir`", "checkpoint.resume=auto"):
        assert words in str(refused.value)
    with claim(path, **second) as run:
        assert weights(run).startswith("of step 6")
    with claim(tmp_path / "third", other, **second) as run:
        assert weights(run).startswith("of step 5")


def files(path: Path) -> dict[str, bytes]:
    own = (".lock", ".lease")  # whose holder they name
    return {str(each): each.read_bytes() for each in path.rglob("*") if each.is_file() and each.name not in own}


def test_a_command_that_is_refused_changes_nothing(tmp_path, other):
    before = files(tmp_path)
    with pytest.raises(ValueError, match="`rollout.n` is 16 there and 8 here"):
        claim(tmp_path / "other", other, n=8)
    for _ in range(2):  # refused later, for its prompts are others, say, or workers are lacking
        with claim(tmp_path / "other", other, n=8, accept=("rollout", "data"), begin=False) as run:
            assert weights(run) == "of step 5 in other" and run.store.completed(6) is None
            run.check_data("bbbb")
            assert run.record_inputs({"model.path": "another"}) == []
            assert run.started.year == 2020
        assert files(tmp_path) == before
    with claim(tmp_path / "other", begin=False) as run:
        assert weights(run) == "of step 10 in other"
        run.check_data("aaaa")


@pytest.mark.parametrize("refusing", ["dapo.tools.doctor.checks.check_machine", "dapo.driver.run.preflight"])
def test_what_the_program_refuses_before_workers_start_changes_nothing(refusing, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise ValueError("no such GPU")

    cfg = compose([f"trainer.output_dir={tmp_path / 'run'}"], "dapo_tiny")
    with claim_output_dir(cfg.trainer.output_dir, "auto", asdict(cfg)) as run:
        save(run, 5, 10)
    before = files(tmp_path)
    cfg.checkpoint.resume, cfg.actor.optim.lr = str(run.checkpoints / "step_000005"), 1e-7
    monkeypatch.setattr("dapo.tools.doctor.checks.check_machine", lambda *_: None)
    monkeypatch.setattr(refusing, refuse)
    with pytest.raises(ValueError, match="no such GPU"):
        launch(cfg)
    assert files(tmp_path) == before


@pytest.mark.parametrize("target", ["new", "other", "mine"])
def test_what_is_refused(target, tmp_path, other):
    with claim(tmp_path / "mine") as run:
        save(run, 3)
    if target == "mine":
        with pytest.raises(ValueError, match=r"mine\) holds a run and `checkpoint.resume` .* a checkpoint of another"):
            claim(tmp_path / "mine", other)
        return
    for name in ("step_000099", "run.yaml"):
        with pytest.raises(ValueError, match=f"resume` .*{name}. is no checkpoint; give auto, never, or a dir"):
            claim(tmp_path / target, other.with_name(name))
    (other / "weights").write_text("bad")
    with pytest.raises(ValueError, match="`checkpoint.resume` .*weights has 3 bytes"):
        claim(tmp_path / target, other)
    assert (other.with_name("step_000010") / "weights").exists()


@pytest.mark.parametrize("value", ["always", "a/checkpoints", "mystep_000005"])
def test_a_value_that_can_be_none_is_refused_before_anything_starts(value):
    cfg = compose([], "dapo_tiny")
    cfg.checkpoint.resume = value
    with pytest.raises(ValueError, match=r"`checkpoint.resume` \(.*must be auto, never, or a path whose last part"):
        validate(cfg)
