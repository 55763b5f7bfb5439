"""launch/slurm on machines of their own network, with real Ray nodes: a whole job, and what can befall it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.netns.machines import SCRATCH, Machine, Machines, why_not
from tests.support.netns.slurm import ROOT, Slurm
from tests.support.outcomes import assert_all_draws_are_accounted_for, last_line
from tests.support.runs import SMALL

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1500)]

STEPS = 5
RUN = (
    *("+experiment=dapo_tiny", *SMALL, "data.val_files=[]", "trainer.device=cpu", f"trainer.total_steps={STEPS}"),
    *("checkpoint.every=1", "eval.every=0", "eval.before_train=false", "eval.after_train=false"),
)
UP_S, STEP_S, END_S = 300.0, 600.0, 120.0
# Engines and ranks have places by GPUs that are not there; and a job without a run.
PLACED = '"-m dapo.main_ppo "*) shift 2; exec {python} -m tests.support.netns.placed_run "$@"'
IDLE = '"-m dapo.main_ppo "*) echo "at $RAY_ADDRESS"'
TAKEN = """
import socket, sys, time
taken = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
print("taken", flush=True)
time.sleep(600)
"""
STRANGER = Path(ROOT, "tests/support/netns/stranger.py")


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
    with Slurm(tmp_path, switch.machines, str(tmp_path / "python")) as made:
        run_by(made, PLACED)
        yield made


def run_by(slurm: Slurm, driver: str) -> None:
    python = slurm.folder / "python"
    cases = (driver.format(python=sys.executable), f'*) exec {sys.executable} "$@"')
    python.write_text(f'#!/bin/bash\ncase "$*" in {" ;; ".join(cases)} ;; esac\n')
    python.chmod(0o755)


def start(slurm: Slurm, **env: str) -> Path:
    """A run in the output directory that it returns."""
    slurm.sbatch("train.sbatch", *RUN, f"trainer.output_dir={slurm.folder / 'run'}", LEAD_S="60", **env)
    return slurm.folder / "run"


def until_step(slurm: Slurm, run: Path, number: int) -> None:
    log = run / "metrics.jsonl"
    slurm.until(lambda: log.exists() and log.read_text().count("actor/loss") >= number, STEP_S, f"step {number}")


def role(title: str) -> str:
    """What a process is, by its command line or the title it gave itself."""
    for pattern, name in (
        (r"ray::(\w+)", r"\1"),
        (r"VLLM::(\w+)", r"\1"),
        (r".*/(gcs_server|raylet) .*", r"\1"),
        (r".*-m (ray\.util\.client\.server) .*", r"\1"),
        (r".*tests.support.netns.placed_run .*", "driver"),
    ):
        if match := re.match(pattern, title):
            return match.expand(name)
    return title


def roles(machine: Machine) -> list[str]:
    return [role(" ".join(process.cmdline())) for process in machine.work()]


def allowed() -> dict[str, str]:
    """What launch/README.md says of each role that listens: on which addresses, and who may speak to it."""
    table = (ROOT / "launch/README.md").read_text().partition("| process | listens on | asks for the token |")[2]
    rows = [row.strip("| ").split(" | ") for row in table.partition("\n\n")[0].splitlines()[2:]]
    return {f"{name} on {where}": asks for names, where, asks in rows for name in re.findall(r"`([^`]+)`", names)}


def listening(machine: Machine, stranger: Machine, expected: dict[str, str]) -> dict[str, str]:
    """The same as it is; what should ask for a token is called from another machine, without one."""
    where = {"*": "all", machine.address: "its address"}
    found = [
        (f"{role(' '.join(process.cmdline()))} on {where.get(address, 'loopback')}", port)
        for process, address, port in machine.listeners()
    ]
    asking = [port for name, port in found if expected.get(name) == "yes"]
    said = stranger.do(sys.executable, str(STRANGER), *[f"{machine.address}:{port}" for port in asking]).splitlines()
    codes = dict(zip(asking, (line.split()[1] for line in said), strict=True))
    asks = {"UNAUTHENTICATED": "yes", "401": "yes"}
    result: dict[str, str] = {}
    for name, port in found:
        one = asks.get(codes[port], codes[port]) if port in codes else expected.get(name, "?")
        result[name] = one if result.get(name, one) == one else f"{result[name]}, {one}"
    return result


def test_a_run_across_machines(slurm: Slurm, switch: Machines) -> None:
    """It is signalled, queues itself again and goes on; then the second machine is cut off, and then Ray dies there."""
    first, second = switch.machines
    run = start(slurm)
    until_step(slurm, run, 1)
    assert roles(first).count("RolloutWorker") == 1 and "ActorWorker" not in roles(first)
    assert roles(second).count("ActorWorker") == 2 and "RolloutWorker" not in roles(second)
    expected = allowed()
    found = listening(first, second, expected) | listening(second, first, expected)
    assert found == expected
    token = (slurm.folder / "outputs/.ray-token-7").read_text()

    slurm.scancel(signal.SIGUSR1)
    assert slurm.wait(END_S) == 85 and slurm.requeued == 1, slurm.said()
    assert slurm.left == [], "driver and nodes end before the job does"
    until_step(slurm, run, 2)
    assert f"resuming from {run}/checkpoints/step_" in slurm.said()
    assert (slurm.folder / "outputs/.ray-token-7").read_text() != token, "each cluster has a token of its own"

    switch.plug(second, "down")
    slurm.until(lambda: "the actors are lost" in slurm.said(), STEP_S, "notice")
    switch.plug(second, "up")
    slurm.until(lambda: "the actors are back" in slurm.said(), STEP_S, "recovery")
    until_step(slurm, run, 4)
    second.kill("raylet")
    assert slurm.wait(STEP_S) == 0, slurm.said()
    assert slurm.said().count("the actors are back") == 2 and f"step {STEPS}/{STEPS}" in slurm.said()
    assert last_line(run)["step"] == STEPS
    assert_all_draws_are_accounted_for(run)
    said = (run / "nodes/7.1/node1.log").read_text()
    assert said.count("node.sh: Ray on node1 ended with 1; it starts again") == 2
    assert (run / "nodes/7.1/node1/raylet.out").exists()
    assert os.listdir(f"/proc/{second.init}/root{SCRATCH}") == [f"dapo-cache-{os.getuid()}"], "the caches alone stay"


def test_a_head_that_dies_ends_the_job(slurm: Slurm, switch: Machines) -> None:
    run = start(slurm, DOCTOR="0")
    until_step(slurm, run, 1)
    switch.machines[0].kill("gcs_server")
    assert slurm.wait(END_S) == 1 and slurm.requeued == 0, slurm.said()
    assert slurm.said().count("has not answered for 30 s") == 1
    # Ray's agents look now and then whether their raylet lives; Slurm ends them with the step.
    assert [title for title in slurm.left if not re.match(r"ray::\w+Agent", title)] == []


def test_a_machine_that_never_comes_up(slurm: Slurm, switch: Machines) -> None:
    run_by(slurm, IDLE)
    switch.plug(switch.machines[1], "down")
    start(slurm, DOCTOR="0", READY_S="20")
    assert slurm.wait(END_S) == 1
    assert "dapo: 1 of 2 nodes joined 10.77.0.11:20007 within 20 s" in slurm.said()
    assert slurm.left == [] and "at 10.77" not in slurm.said()


def test_ports_in_use_are_passed_over(slurm: Slurm, switch: Machines) -> None:
    """Those of somebody else's Ray: the head's, of Ray's client, of its dashboard."""
    run_by(slurm, IDLE)
    inside = ("nsenter", f"--target={switch.machines[0].init}", "--net", sys.executable, "-c", TAKEN)
    other = subprocess.Popen([*inside, "20007", "10001", "8265"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline()
        start(slurm, DOCTOR="0", READY_S="60")
        assert slurm.wait(END_S) == 0, slurm.said()
    finally:
        other.kill()
        other.communicate()
    assert "at 10.77.0.11:20008" in slurm.said() and slurm.left == []
