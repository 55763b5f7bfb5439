"""Whole runs in which something dies or breaks: they go on by themselves, and end as if nothing had happened."""

import hashlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from dapo.faults import points as faults
from dapo.faults.points import ONCE, VARIABLE
from dapo.state.quarantine import QUARANTINE
from tests.support.runs import START_S, Runs, checkpoint, command, finish, metrics, start_program

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

STEPS = 3
RUN = (
    *(f"trainer.total_steps={STEPS}", "checkpoint.every=1", "eval.every=0", "eval.before_train=false"),
    *("eval.after_train=false", "actor.num_workers=2", "actor.timeout_s=60"),
)
IDENTITY = ("in_generation", "in_reward", "buffered", "to_retry", "trained", "all_correct", "all_wrong", "unscorable")


def outcome(output_dir: Path) -> tuple[str, list[dict[str, Any]]]:
    """What must not depend on faults: the trained weights, and the metrics without times."""
    weights = checkpoint(output_dir) / "hf" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest(), metrics(output_dir)


def last_line(output_dir: Path) -> dict[str, Any]:
    return json.loads((output_dir / "metrics.jsonl").read_text().splitlines()[-1])


def assert_all_draws_are_accounted_for(output_dir: Path) -> None:
    for line in map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines()):
        draws = sum(line[f"ledger/draws_{name}"] for name in (*IDENTITY, "overlong"))
        assert draws == line["ledger/drawn"]


def break_once(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process, and the workers that it starts from now on, have one fault together."""
    (tmp_path / "once").mkdir()
    monkeypatch.setattr(faults, "_passed", Counter())
    monkeypatch.setenv(VARIABLE, fault)
    monkeypatch.setenv(ONCE, str(tmp_path / "once"))


@pytest.fixture(scope="module")
def undisturbed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    return outcome(runs.small(tmp_path_factory.mktemp("undisturbed") / "run", *RUN))


@pytest.mark.parametrize(
    ("fault", "restarts"),
    [
        pytest.param("actor.update:kill@2", 1, id="rank killed before a forward pass"),
        pytest.param("actor.step:kill@6", 1, id="rank killed between optimizer steps"),
        pytest.param("actor.step:stop@6", 1, id="rank stopped between optimizer steps"),
        pytest.param("actor.gather:kill@3", 1, id="rank killed in the weight sync"),
        pytest.param("actor.save:kill@2", 1, id="rank killed in a save"),
    ],
)
def test_a_lost_rank_costs_time_and_nothing_else(
    runs: Runs,
    undisturbed: tuple[str, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: str,
    restarts: int,
) -> None:
    break_once(fault, tmp_path, monkeypatch)
    found = runs.small(tmp_path / "run", *RUN)
    assert (tmp_path / "once" / fault).exists(), "the point was not reached"
    assert outcome(found) == undisturbed
    assert last_line(found)["perf/restarted_actors"] == restarts
    assert_all_draws_are_accounted_for(found)
    out, err = capfd.readouterr()
    assert f"the actors are lost and start again (1 of {5} within an hour)" in err and "the actors are back" in out


def kills_an_engine(output_dir: Path) -> Callable[[Any], bool]:
    """What kills the engine's process once a step is done."""

    def kill(engines: Any) -> bool:
        log = output_dir / "metrics.jsonl"
        if not log.exists() or len(log.read_text().splitlines()) < 1:
            return False
        actor = ray.get(engines.workers[0].__ray_call__.remote(lambda worker: os.getpid()), timeout=60)
        cores = [each for each in psutil.Process(actor).children(recursive=True) if "EngineCore" in each.name()]
        cores[0].kill()
        return True

    return kill


def test_an_engine_lost_in_a_run_costs_time_and_nothing_else(
    runs: Runs, undisturbed: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    found = runs.small(tmp_path / "run", *RUN, beside=kills_an_engine(tmp_path / "run"))
    assert outcome(found) == undisturbed
    assert last_line(found)["perf/restarted_engines"] >= 1
    assert_all_draws_are_accounted_for(found)


def test_at_staleness_1_no_draw_is_lost_or_too_old_after_faults(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_once("actor.step:kill@6", tmp_path, monkeypatch)
    overlapped = ("filter_groups.max_staleness=1", "trainer.total_steps=5")
    found = runs.small(tmp_path / "run", *RUN, *overlapped, beside=kills_an_engine(tmp_path / "run"))
    lines = metrics(found)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert max(line["batch/staleness_max"] for line in lines) <= 1
    last = last_line(found)
    assert last["perf/restarted_actors"] == 1 and last["perf/restarted_engines"] >= 1
    assert_all_draws_are_accounted_for(found)


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
    runs: Runs, undisturbed: tuple[str, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_once("save.written:full@2", tmp_path, monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, "checkpoint.keep=0")
    assert outcome(found) == undisturbed
    saved = sorted(path.name for path in (found / "checkpoints").glob("step_*"))
    assert len(saved) == STEPS - 1 and saved[-1] == f"step_{STEPS:06d}"


def test_a_loss_that_is_not_finite_skips_its_step_and_sets_the_groups_aside(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_once("actor.loss:nan@3", tmp_path, monkeypatch)
    found = runs.small(tmp_path / "run", *RUN)
    skipped = [line["actor/skipped_steps"] for line in metrics(found)]
    assert len(skipped) == STEPS and sum(skipped) == 1
    [entry] = (found / QUARANTINE).iterdir()
    why = json.loads((entry / "why.json").read_text())
    assert why["reason"] == "nonfinite" and len(why["draws"]) == 2, "one mini-batch of two groups"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("driver.updated:kill@2", id="after an update"),
        pytest.param("save.placed:kill@2", id="in a save"),
        *(
            pytest.param(f"{point}:kill@2", id=point, marks=pytest.mark.long)
            for point in ("driver.collected", "driver.synced", "save.written", "save.sealed", "save.aside")
        ),
    ],
)
def test_a_killed_driver_goes_on_with_the_same_command(
    ray_cluster: None, undisturbed: tuple[str, list[dict[str, Any]]], tmp_path: Path, fault: str
) -> None:
    address = ray.get_runtime_context().gcs_address
    line = command(tmp_path / "run", "", *RUN, f"trainer.ray_address={address}")
    (tmp_path / "once").mkdir()
    env = os.environ | {VARIABLE: fault, ONCE: str(tmp_path / "once")}
    killed = subprocess.run(line, capture_output=True, text=True, timeout=START_S, env=env)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = subprocess.run(line, capture_output=True, text=True, timeout=START_S)
    assert again.returncode == 0, again.stderr
    assert outcome(tmp_path / "run") == undisturbed
    assert_all_draws_are_accounted_for(tmp_path / "run")


def test_sigterm_while_everything_starts_ends_the_program_in_order(tmp_path: Path) -> None:
    line = command(tmp_path / "run", "", *RUN)
    process, children = start_program(line, "data.train_files")
    os.kill(process.pid, signal.SIGTERM)
    returncode, err = finish(process, children)
    assert returncode == 85, err
