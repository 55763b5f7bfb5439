"""Whole runs in which something dies or breaks: they go on by themselves, and end as if nothing had happened."""

import json
import math
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import ray

from dapo.config.paths import resolve_path
from dapo.ground import fault_points as faults
from dapo.ground.console import EXIT_RESUMABLE
from dapo.ground.fault_points import ONCE, VARIABLE
from dapo.state.quarantine import QUARANTINE
from tests.support.cluster import join_cluster
from tests.support.outcomes import RUN, assert_all_draws_are_accounted_for, last_line, outcome
from tests.support.runs import START_S, Runs, command, finish, metrics, start_program

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

IN_MEMORY = ("checkpoint.memory_copies=1", "checkpoint.every=0")
Undisturbed = tuple[str, list[dict[str, Any]]]


def assert_undisturbed(found: Path, undisturbed: Undisturbed) -> None:
    if fault := os.environ.get(VARIABLE):
        assert Path(os.environ[ONCE], fault).exists(), "the point was not reached"
    assert outcome(found) == undisturbed
    assert_all_draws_are_accounted_for(found)


def break_once(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process, and the workers that it starts from now on, have one fault together."""
    (tmp_path / "once").mkdir()
    monkeypatch.setattr(faults, "_passed", Counter())
    monkeypatch.setenv(VARIABLE, fault)
    monkeypatch.setenv(ONCE, str(tmp_path / "once"))


def assert_told(capfd: pytest.CaptureFixture[str]) -> str:
    out, err = capfd.readouterr()
    assert "the actors are lost and start again (1 of 5 within an hour or without a new step)" in err
    assert "the actors are back" in out
    return out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "overrides"),
    [
        pytest.param("actor.step:stop@6", (), id="stopped between optimizer steps"),
        pytest.param("actor.gather:kill@3", (), id="killed in the weight sync"),
        pytest.param("actor.write:kill@2", ("checkpoint.async_save=true",), id="killed while it writes beside a step"),
        pytest.param("actor.step:kill@10", IN_MEMORY, id="killed in the last update, with copies in memory"),
        pytest.param("actor.copy:kill@2", IN_MEMORY, id="killed while it copies to memory"),
    ],
)
def test_a_lost_rank_costs_time_and_nothing_else(
    runs: Runs,
    undisturbed: Undisturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: str,
    overrides: tuple[str, ...],
) -> None:
    break_once(fault, tmp_path, monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, *overrides)
    assert_undisturbed(found, undisturbed)
    assert last_line(found)["perf/restarted_actors"] == 1
    out = assert_told(capfd)
    assert ("in the memory of the nodes (own copies)" in out) == (IN_MEMORY == overrides)


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


@pytest.mark.nightly
def test_an_engine_and_a_rank_lost_in_a_run_cost_time_and_nothing_else(
    runs: Runs,
    undisturbed: Undisturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The rank in the update of the second step, the engine at any time after the first."""
    break_once("actor.step:kill@6", tmp_path, monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, beside=kills_an_engine(tmp_path / "run"))
    assert_undisturbed(found, undisturbed)
    last = last_line(found)
    assert last["perf/restarted_actors"] == 1 and last["perf/restarted_engines"] >= 1
    assert_told(capfd)


@pytest.mark.nightly
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


REWARD = """
import math
from dapo.rewards.math import compute_score as verdict

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if int(ground_truth) % 5 == 0 or len(solution_str) % 7 == 0:
        return math.nan
    return verdict(data_source, solution_str, ground_truth, extra_info)
"""


@pytest.mark.nightly
def test_numbers_that_are_not_finite_cost_their_step_or_response_and_nothing_else(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss in the first update, a gradient in the second, and rewards throughout; each update has four steps."""
    break_once("actor.loss:nan@3,actor.gradient:nan@7", tmp_path, monkeypatch)
    (tmp_path / "reward.py").write_text(REWARD)
    functions = f"reward.functions=[{{path:{tmp_path / 'reward.py'},name:compute_score}}]"
    found = runs.small(tmp_path / "run", *RUN, functions)
    lines = metrics(found)
    assert [line["actor/skipped_steps"] for line in lines] == [1, 1, 0]
    assert all(math.isfinite(line[name]) for line in lines for name in ("actor/loss", "actor/grad_norm"))
    entries = sorted((found / QUARANTINE).iterdir())
    assert [entry.name for entry in entries] == ["step_000000-nonfinite", "step_000001-nonfinite"]
    for entry in entries:
        assert len(json.loads((entry / "why.json").read_text())["draws"]) == 2, "one mini-batch of two groups"
    assert sum(line["buffer/unscorable"] for line in lines) > 0
    assert_all_draws_are_accounted_for(found)


@pytest.mark.parametrize(
    "faults_and_ends",
    [
        pytest.param(
            [("driver.updated:kill@2", -signal.SIGKILL)], id="a kill", marks=pytest.mark.nightly
        ),  # step 2 again
        pytest.param(
            [
                ("driver.collected:kill@1", -signal.SIGKILL),  # nothing but a journal
                ("driver.updated:kill@1", -signal.SIGKILL),  # step 1 again
                ("save.written:term@1", EXIT_RESUMABLE),  # saved to its end
                ("driver.collected:term@1", EXIT_RESUMABLE),  # step 2 is updated to its end, saved, and not evaluated
                ("driver.evaluated:term@3", EXIT_RESUMABLE),  # that evaluation is begun, and will be again
                ("save.placed:kill@1", -signal.SIGKILL),  # of step 3
            ],
            id="signals and kills",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_driver_that_ends_again_and_again_goes_on_with_the_same_command(
    ray_cluster: None, undisturbed: Undisturbed, tmp_path: Path, faults_and_ends: Sequence[tuple[str, int]]
) -> None:
    """Nothing is trained twice or left out, in sum: weights and metrics are those of the undisturbed run."""
    held_out = pq.read_table(resolve_path("pkg://dapo.tiny/data/val.parquet")).slice(0, 8)
    pq.write_table(held_out, tmp_path / "val.parquet")
    run = tmp_path / "run"
    line = command(run, str(tmp_path / "val.parquet"), *RUN, "eval.every=2", join_cluster())
    for fault, end in (*faults_and_ends, ("", 0)):
        done = subprocess.run(line, capture_output=True, text=True, timeout=START_S, env=os.environ | {VARIABLE: fault})
        assert done.returncode == end, (fault, done.stdout[-2000:], done.stderr)
        if end == EXIT_RESUMABLE:
            assert "the same command continues the run" in done.stderr and len(done.stderr.splitlines()) == 1
    weights, lines = outcome(run)
    evaluated = [line for line in lines if "eval/accuracy" in line]
    assert [line["step"] for line in evaluated] == [2]
    assert (weights, [line for line in lines if line not in evaluated]) == undisturbed
    assert_all_draws_are_accounted_for(run)


@pytest.mark.nightly
def test_sigterm_while_everything_starts_ends_the_program_in_order(tmp_path: Path) -> None:
    line = command(tmp_path / "run", "", *RUN)
    process, children = start_program(line, "data.train_files")
    os.killpg(process.pid, signal.SIGTERM)
    returncode, err = finish(process, children)
    assert returncode == 85, err
