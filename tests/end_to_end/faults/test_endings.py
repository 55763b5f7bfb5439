"""How the real program ends: Ctrl-C, dead workers, Ray's own processes. SIGTERM: test_faults.py."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.support.runs import checkpoint, command, finish, start_program

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1500)]


def start(output_dir: Path, *overrides: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A program after its second step, and all processes below it."""
    endless = ("trainer.total_steps=1000", "eval.every=0", "eval.before_train=false", "checkpoint.every=0")
    endless += ("actor.num_workers=1",)  # a process less to start
    return start_program(command(output_dir, "", *endless, *overrides), "step 2/")


def test_ctrl_c_saves_what_was_trained(tmp_path: Path) -> None:
    process, children = start(tmp_path / "run")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    returncode, err = finish(process, children)
    assert returncode == 130, err
    assert checkpoint(tmp_path / "run").name >= "step_000002"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] >= 2


@pytest.mark.parametrize(
    ("name", "saved"),
    [pytest.param("EngineCore", True, id="engine"), pytest.param("ActorWorker", False, id="actor rank")],
)
def test_a_dead_worker_that_may_not_start_again_ends_the_run_with_its_reason(
    tmp_path: Path, name: str, saved: bool
) -> None:
    """What was trained is saved as long as all actor ranks live; a dead rank took its shards with it."""
    process, children = start(tmp_path / "run", "rollout.max_restarts=0", "actor.max_restarts=0")
    victim = next(child for child in children if name in " ".join(child.cmdline()))
    victim.kill()
    returncode, err = finish(process, children)
    assert returncode == 1 and name[:5].lower() in err.lower() and "max_restarts`" in err
    assert (tmp_path / "run" / "checkpoints" / "LATEST").exists() == saved


def test_a_dead_head_of_ray_ends_the_run_in_order(tmp_path: Path) -> None:
    """Ray itself would end all processes a minute later, without a word and with nothing saved."""
    process, children = start(tmp_path / "run")
    began = time.monotonic()
    next(child for child in children if "gcs_server" in child.name()).kill()
    returncode, err = finish(process, children)
    assert time.monotonic() - began < 50
    assert returncode == 1 and "Ray's head process (GCS) at" in err and "the same command continues" in err
    assert checkpoint(tmp_path / "run").name >= "step_000002"


def test_a_raylet_that_stands_still_ends_the_run_once_ray_has_given_its_node_up(tmp_path: Path) -> None:
    """It holds the object store: a driver that waits there hears no signal."""
    process, children = start(tmp_path / "run")
    next(child for child in children if child.name() == "raylet").suspend()
    returncode, err = finish(process, children)
    assert returncode == 85 and "(raylet) stands still" in err, err
