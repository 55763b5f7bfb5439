"""launch/slurm: the job's shell on stand-ins for srun, scontrol, squeue and Python that record what they are told."""

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.support.batch import UNTIL_TERM, ended, fake, start, wait_for

ROOT = Path(__file__).resolve().parents[2]
SAVES = "trap 'sleep 0.3; echo saved; exit 85' USR1; touch started; while true; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("cluster", "status", "said"),
    [
        pytest.param({"driver": 'echo "got ${*:3}"'}, 0, "got +experiment=dapo_qwen32b\n", id="done"),
        pytest.param({"driver": "exit 3"}, 3, "the driver ended with 3", id="driver_fails"),
        pytest.param({"driver": 'stat -c "mode %a" $RAY_AUTH_TOKEN_PATH'}, 0, "mode 600", id="token_is_private"),
        pytest.param({"driver": "wc -c <$RAY_AUTH_TOKEN_PATH"}, 0, "64\n", id="token_has_256_bits"),
        pytest.param({"driver": "echo $RAY_AUTH_MODE"}, 0, "token\n", id="token_is_asked_for"),
        pytest.param({"driver": "ls outputs/run/nodes/7.0/*.log | wc -l"}, 0, "2\n", id="a_log_for_each_node"),
        pytest.param({"driver": "echo ran", "alive": 1}, 1, "1 of 2 nodes joined", id="deadline"),
        pytest.param(
            {"driver": "echo ran", "alive": 1, "node": "echo no disk; exit 1"},
            1,
            "no disk",
            id="node_dies_and_says_why",
        ),
        pytest.param(
            {"driver": "echo up", "node": "trap '' TERM; while true; do sleep 0.05; done"},
            0,
            "up\n",
            id="node_hears_no_signal",
        ),
        pytest.param({"driver": "echo ran", "plan": "exit 1"}, 1, "LEAD_S=3600", id="no_plan"),
        pytest.param(
            {"driver": "echo planless", "plan": "exit 1", "LEAD_S": "9"}, 0, "planless", id="no_plan_but_a_lead"
        ),
        pytest.param({"driver": "echo ran", "left": "1100"}, 1, "signalled 600 s before the end", id="limit_too_short"),
        pytest.param({"driver": "echo ran", "doctor": "echo ill; exit 1"}, 1, "ill\n", id="doctor_finds_a_fault"),
        pytest.param({"driver": "echo up", "doctor": "exit 1", "DOCTOR": "0"}, 0, "up\n", id="doctor_not_asked"),
        pytest.param(
            {"driver": 'echo "got ${*:3}"', "SLURM_RESTART_COUNT": "1", "plan": "echo lead_s 600; echo resume never"},
            *(0, "checkpoint.resume=auto\n"),
            id="resumed",
        ),
        pytest.param(
            {"driver": 'echo "got ${*:3}"', "SLURM_RESTART_COUNT": "1", "plan": "echo lead_s 600; echo resume /a/b"},
            *(0, "got +experiment=dapo_qwen32b\n"),
            id="resumed_from_a_path",
        ),
        pytest.param(
            {"driver": 'echo "got ${*:3}"', "SLURM_RESTART_COUNT": "1", "plan": "exit 1", "LEAD_S": "9"},
            *(0, "got +experiment=dapo_qwen32b\n"),
            id="resumed_without_a_plan",
        ),
        pytest.param(
            {"driver": 'echo "$2 ${*:3}"', "script": "eval"},
            0,
            "dapo.evaluate +experiment=dapo_qwen32b",
            id="evaluates",
        ),
        pytest.param({"driver": "exit 138", "script": "eval"}, 138, "ended with 138", id="evaluation_is_cut_off"),
    ],
)
def test_a_job_ends_as_its_driver_does(tmp_path: Path, cluster: dict, status: int, said: str) -> None:
    job = start(tmp_path, **cluster)
    output = ended(job)
    assert (job.returncode, said in output) == (status, True), output
    assert "ran" not in output.split(), "no driver without its cluster"
    assert not list((tmp_path / "outputs").glob(".ray-token*")), "the token goes with its cluster"
    assert not (tmp_path / "scratch/dapo-7").exists(), "what Ray leaves on a node's disk goes with it"
    assert not [each for each in psutil.process_iter(["cmdline"]) if f"--temp-dir={tmp_path}" in str(each.info)]


def test_nodes_may_open_more_files_than_the_shell_of_the_job(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        told = "until (($(cat outputs/run/nodes/7.0/*.log | wc -l) == 2)); do sleep 0.05; done"
        job = start(tmp_path, driver=told, node=f"ulimit -Sn; {UNTIL_TERM}")
        ended(job)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    logs = [each.read_text().split() for each in (tmp_path / "outputs/run/nodes/7.0").glob("*.log")]
    assert logs == [[str(min(hard, 65536))]] * 2


def test_a_port_in_use_is_passed_over(tmp_path: Path) -> None:
    import socket

    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("0.0.0.0", 20007))
        output = ended(start(tmp_path, driver="echo ${RAY_ADDRESS##*:}"))
    assert "\n20008\n" in output, output


@pytest.mark.parametrize(
    ("number", "env", "requeued"),
    [
        pytest.param(signal.SIGUSR1, {}, True, id="time_limit"),
        pytest.param(signal.SIGUSR1, {"REQUEUE": "0"}, False, id="requeue_off"),
        pytest.param(signal.SIGUSR1, {"SLURM_RESTART_COUNT": "100"}, False, id="too_often"),
        pytest.param(signal.SIGUSR2, {}, False, id="asked_to_end"),
        pytest.param(signal.SIGTERM, {}, False, id="cancelled"),
    ],
)
def test_a_signal_saves_and_queues_the_job_again(
    tmp_path: Path, number: signal.Signals, env: dict[str, str], requeued: bool
) -> None:
    job = start(tmp_path, driver=SAVES, **env)
    wait_for(tmp_path / "started")
    job.send_signal(number)
    output = ended(job)
    assert job.returncode == 85 and "saved" in output, output
    assert (tmp_path / "scontrol.log").exists() == requeued, output
    if requeued:
        assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGUSR2, False), (signal.SIGTERM, False)]
)
def test_a_job_that_is_told_before_its_driver_runs_starts_over_where_it_was_preempted(
    tmp_path: Path, number: signal.Signals, requeued: bool
) -> None:
    job = start(tmp_path, driver="echo ran", doctor="touch looking; while [[ ! -e enough ]]; do sleep 0.05; done")
    wait_for(tmp_path / "looking")
    job.send_signal(number)
    (tmp_path / "enough").touch()
    output = ended(job)
    assert job.returncode == (85 if requeued else 1) and "ran" not in output.split(), output
    assert (tmp_path / "scontrol.log").exists() == requeued, output
    assert not list((tmp_path / "outputs").glob(".ray-token*"))


def test_a_driver_that_does_not_yet_hear_is_started_again(tmp_path: Path) -> None:
    """A signal ends it while Python reads its imports, from a busy disk: nothing was trained that could be lost."""
    job = start(tmp_path, driver="touch started; while true; do sleep 0.05; done")
    wait_for(tmp_path / "started")
    job.send_signal(signal.SIGUSR1)
    output = ended(job)
    assert job.returncode == 85 and (tmp_path / "scontrol.log").read_text() == "requeue 7\n", output


def test_a_signal_between_the_drivers_start_and_the_note_of_its_number_reaches_it(tmp_path: Path) -> None:
    hook = "until [[ -e started ]]; do /usr/bin/sleep 0.05; done; kill -USR1 $$"
    (tmp_path / "hook").write_text(f"""
[[ $0 != *train.sbatch ]] || {{ set -T; trap '[[ $BASH_COMMAND != "driver=\\$!" ]] || {{ {hook}; }}' DEBUG; }}
""")
    driver = "exec >driver.log; trap 'echo saved; exit 85' USR1; touch started; for _ in {1..200}; do sleep 0.05; done"
    job = start(tmp_path, driver=driver, BASH_ENV=str(tmp_path / "hook"))
    output = ended(job)
    assert job.returncode == 85 and (tmp_path / "driver.log").read_text() == "saved\n", output


def test_the_driver_is_told_once(tmp_path: Path) -> None:
    """Its second signal would mean: leave at once."""
    told = "trap 'echo told >>told' USR1; trap 'echo term >>told; exit 85' TERM; touch started; "
    job = start(tmp_path, driver=told + "until [[ -e enough ]]; do sleep 0.05; done; exit 85")
    wait_for(tmp_path / "started")
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        job.send_signal(number)
        time.sleep(0.3)
    wait_for(tmp_path / "told")
    (tmp_path / "enough").touch()
    output = ended(job)
    assert (tmp_path / "told").read_text() == "told\n", output
    assert "SIGTERM after SIGUSR1" in output, output


def test_the_time_limit_is_watched_and_may_move(tmp_path: Path) -> None:
    job = start(tmp_path, driver=SAVES, left="$([[ -e started ]] && echo 599 || echo 7200)")
    output = ended(job)
    assert job.returncode == 85 and "SIGUSR1: the driver saves" in output, output
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"


def test_a_worker_starts_again_and_its_logs_come_home(tmp_path: Path) -> None:
    """Ray gives up a node that it hears nothing of for a while, and `ray start --block` ends. What processes leave in
    the temporary directory, as an engine that is killed does its sockets, goes with the job."""
    logs = 'for word; do case $word in --temp-dir=*) dir=${word#*=}/session_2/logs;; esac; done; mkdir -p "$dir"'
    first = "[[ -e once ]] || { touch once; exit 3; }"
    told = "echo $RAY_ADDRESS$TRITON_CACHE_DIR >$dir/raylet.out; mktemp"
    python = fake(tmp_path, "python", f"{logs}; {first}; {told}; {UNTIL_TERM}")
    env = {"RAY_ADDRESS": "10.0.0.1:20007", "NODE_DISK": str(tmp_path / "s"), "LOGS": str(tmp_path / "logs")}
    env |= {"TMPDIR": str(tmp_path / "a_login_nodes")}
    node = subprocess.Popen(
        ["bash", str(ROOT / "launch/slurm/node.sh"), "worker", str(python)],
        cwd=tmp_path,
        env={**os.environ, **env, "SLURM_JOB_ID": "7"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(tmp_path / "s/dapo-7/ray/session_2/logs/raylet.out")
    node.terminate()
    left, said = node.communicate(timeout=60)
    assert node.returncode == 0 and "ended with 3; it starts again" in said
    assert left.startswith(f"{tmp_path}/s/dapo-7/tmp/")
    (log,) = (tmp_path / "logs").glob("*/raylet.out")
    assert log.read_text() == f"{tmp_path}/s/dapo-cache-{os.getuid()}/triton\n"
    assert not (tmp_path / "s/dapo-7").exists() and (tmp_path / f"s/dapo-cache-{os.getuid()}").exists()


@pytest.mark.parametrize("script", ["train", "eval"])
def test_directives_are_those_of_one_task_a_node(script: str) -> None:
    lines = (ROOT / f"launch/slurm/{script}.sbatch").read_text().splitlines()
    directives = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH")
    )
    assert directives["ntasks-per-node"] == "1" and "exclusive" in directives
    assert ("requeue" in directives) == (script == "train")
    assert directives.get("signal") == ("B:USR1@120" if script == "train" else None), "it serves preemption alone"
