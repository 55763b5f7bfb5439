"""launch/slurm on machines of their own network, with real Ray nodes: a whole job, and what can befall it."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.netns.machines import SCRATCH, Machine, Machines, why_not
from tests.support.netns.slurm import Slurm
from tests.support.outcomes import assert_all_draws_are_accounted_for, last_line
from tests.support.runs import SMALL

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1500)]

STEPS = 5
RUN = (
    *("+experiment=dapo_tiny", *SMALL, "data.val_files=[]", "trainer.device=cpu", f"trainer.total_steps={STEPS}"),
    *("checkpoint.every=1", "eval.every=0", "eval.before_train=false", "eval.after_train=false"),
)
STEP_S, END_S = 600.0, 120.0
# Engines and ranks have places by GPUs that are not there.
PYTHON = f"""#!/bin/bash
case "$*" in
  "-m dapo.main_ppo "*) shift 2; exec {sys.executable} -m tests.support.netns.placed_run "$@" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
STRANGER = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


@pytest.fixture
def switch() -> Iterator[Machines]:
    """Two machines: room for the engine on the first, where the driver is, and for the ranks on the second."""
    if reason := why_not():
        pytest.skip(reason)
    network = Machines(["node0", "node1"])
    with network as machines:
        for machine, gpus in zip(machines, (1, 2), strict=True):
            machine.env["RAY_OVERRIDE_RESOURCES"] = f'{{"CPU": 8, "GPU": {gpus}}}'
        yield network


@pytest.fixture
def slurm(switch: Machines, tmp_path: Path) -> Iterator[Slurm]:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    with Slurm(tmp_path, switch.machines, str(python)) as made:
        yield made


def workers(machine: Machine, name: str) -> int:
    return sum(" ".join(process.cmdline()).startswith(f"ray::{name}") for process in machine.work())


def test_a_run_across_machines(slurm: Slurm, switch: Machines) -> None:
    """It is signalled, queues itself again and goes on; then the second machine is cut off, and then Ray dies there."""
    first, second = switch.machines
    run = slurm.folder / "run"
    log = run / "metrics.jsonl"

    def until_step(number: int) -> None:
        slurm.until(lambda: log.exists() and log.read_text().count("actor/loss") >= number, STEP_S, f"step {number}")

    slurm.sbatch("train.sbatch", *RUN, f"trainer.output_dir={run}", LEAD_S="60")
    until_step(1)
    assert [workers(machine, "RolloutWorker") for machine in (first, second)] == [1, 0]
    assert [workers(machine, "ActorWorker") for machine in (first, second)] == [0, 2]
    refused = f"env -i HOME=/ {sys.executable} -c '{STRANGER}' {first.address}:20007 2>&1 || true"
    assert "InvalidAuthToken" in second.do("sh", "-c", refused), "without the token"
    token = (slurm.folder / "outputs/.ray-token-7").read_text()

    slurm.scancel(signal.SIGUSR1)
    assert slurm.wait(END_S) == 85 and slurm.requeued == 1, slurm.said()
    assert slurm.left == [], "driver and nodes end before the job does"
    until_step(2)
    assert f"resuming from {run}/checkpoints/step_" in slurm.said()
    assert (slurm.folder / "outputs/.ray-token-7").read_text() != token, "each cluster has a token of its own"

    switch.plug(second, "down")
    slurm.until(lambda: "the actors are lost" in slurm.said(), STEP_S, "notice")
    switch.plug(second, "up")
    slurm.until(lambda: "the actors are back" in slurm.said(), STEP_S, "recovery")
    until_step(4)
    second.kill("raylet")
    assert slurm.wait(STEP_S) == 0, slurm.said()
    assert slurm.said().count("the actors are back") == 2 and f"step {STEPS}/{STEPS}" in slurm.said()
    assert last_line(run)["step"] == STEPS
    assert_all_draws_are_accounted_for(run)
    said = (run / "nodes/7.1/node1.log").read_text()
    assert said.count("node.sh: Ray on node1 ended with 1; it starts again") == 2
    assert (run / "nodes/7.1/node1/raylet.out").exists()
    assert os.listdir(f"/proc/{second.init}/root{SCRATCH}") == [f"dapo-cache-{os.getuid()}"], "the caches alone stay"
