"""launch/slurm: the job's shell on stand-ins for srun, scontrol, squeue and Python that record what they are told."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.support.batch import ROOT, UNTIL_TERM, ended, fake, start, wait_for

SAVES = "trap 'sleep 0.3; echo saved; exit 85' USR1; touch started; while true; do sleep 0.05; done"
DEAF = "touch started; while true; do sleep 0.05; done"
GOT = 'echo "got $2 ${*:3}"'
AGAIN = {"driver": GOT, "SLURM_RESTART_COUNT": "1"}
ASKED = "got dapo.main_ppo +experiment=dapo_qwen32b\n"


def assert_nothing_is_left(folder: Path) -> None:
    assert not list((folder / "outputs").glob(".ray-token*")), "the token goes with its cluster"
    assert not (folder / "scratch/dapo-7").exists(), "what Ray leaves on a node's disk goes with it"
    assert not [each for each in psutil.process_iter(["cmdline"]) if f"--temp-dir={folder}" in str(each.info)]


def test_a_job_has_its_own_token_ports_and_limits_whatever_the_environment_says(tmp_path: Path) -> None:
    """The environment of a person and a site: another cluster's token, Slurm's settings, a shared SCRATCH, a shell's
    limit of open files, bash 4.4, a port in use, Python by its name in PATH."""
    from ray.scripts.scripts import start as ray_start

    (tmp_path / "site").write_text("""
unset EPOCHSECONDS EPOCHREALTIME SRANDOM BASH_ARGV0
[[ $0 != *train.sbatch ]] || ulimit -Sn 256
""")
    env = {"RAY_AUTH_TOKEN": "0" * 64, "SLURM_EXPORT_ENV": "NONE", "SLURM_TIME_FORMAT": "%d %b", "PYTHON": "python"}
    env |= {"RAY_TMPDIR": "/elsewhere", "SCRATCH": str(tmp_path / "lustre"), "BASH_ENV": str(tmp_path / "site")}
    logs = "outputs/run/nodes/7.0/*.log"
    driver = (
        f"until (($(cat {logs} | wc -l) == 4)); do sleep 0.05; done; cat {logs}; {GOT}; wc -c <$RAY_AUTH_TOKEN_PATH"
    )
    driver += '; stat -c "mode %a" $RAY_AUTH_TOKEN_PATH; echo "${RAY_AUTH_TOKEN:-file} $RAY_TMPDIR ${RAY_ADDRESS##*:}"'
    node = f'echo "$*"; echo $RAY_AUTH_MODE $RAY_TMPDIR $(ulimit -Sn); {UNTIL_TERM}'
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("0.0.0.0", 20007))
        job = start(tmp_path, driver=driver, node=node, **env)
        output = ended(job)
    assert job.returncode == 0 and "unbound" not in output, output
    disk = tmp_path / "scratch"
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65536)
    assert output.count(f"token {disk} {files}\n") == 2, output
    assert f"{ASKED}64\nmode 600\nfile {disk} 20008\n" in output, output
    assert "--dashboard-host=127.0.0.1 --ray-client-server-port=20009 --no-monitor" in output, output
    known = {option for parameter in ray_start.params for option in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", "".join(re.findall(r"ray\.scripts start .*", output)))) <= known
    assert not (tmp_path / "lustre").exists(), "nodes that keep Ray's files in one folder take each other's"
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("cluster", "status", "said"),
    [
        pytest.param({"driver": "exit 3"}, 3, "the driver ended with 3", id="driver_fails"),
        pytest.param({"alive": 1}, 1, "1 of 2 nodes joined", id="deadline"),
        pytest.param({"alive": 1, "node": "echo no disk; exit 1"}, 1, "no disk", id="node_dies_and_says_why"),
        pytest.param(
            {"driver": "echo up", "node": "trap '' TERM; while true; do sleep 0.05; done"}, 0, "up\n", id="deaf_node"
        ),
        pytest.param({"plan": "exit 1"}, 1, "LEAD_S=3600", id="no_plan"),
        pytest.param({"left": "1100"}, 1, "signalled 600 s before the end", id="limit_too_short"),
        pytest.param({"doctor": "echo ill; exit 1"}, 1, "ill\n", id="doctor_finds_a_fault"),
        pytest.param(
            {**AGAIN, "plan": "echo lead_s 600; echo resume never"}, 0, "checkpoint.resume=auto\n", id="again"
        ),
        pytest.param({**AGAIN, "plan": "echo lead_s 600; echo resume /a/b"}, 0, ASKED, id="again_from_a_path"),
        pytest.param(
            {**AGAIN, "plan": "exit 1", "LEAD_S": "9", "doctor": "exit 1", "DOCTOR": "0"}, 0, ASKED, id="lead_no_doctor"
        ),
        pytest.param({"driver": "exit 138", "script": "eval"}, 138, "ended with 138", id="evaluation_is_cut_off"),
        pytest.param({"plan": "echo bad key >&2; exit 1", "script": "eval"}, 1, "bad key\n", id="evaluation_refused"),
        pytest.param({"PYTHON": "python9"}, 1, "python9 does not exist", id="no_python"),
        pytest.param(
            {"CONTAINER": "x", "CONTAINER_RUNTIME": "podman"}, 1, "it can be pyxis or apptainer", id="unknown_runtime"
        ),
        pytest.param({"driver": "echo at $RAY_ADDRESS", "NODE_NETWORK": "lo"}, 0, "\nat 127.0.0.1:", id="interface"),
        pytest.param({"driver": "echo at $RAY_ADDRESS", "NODE_NETWORK": "127.0"}, 0, "\nat 127.0.0.1:", id="network"),
        pytest.param({"NODE_NETWORK": "ib7"}, 1, "NODE_NETWORK (ib7) is no interface", id="no_interface"),
        pytest.param({"NODE_NETWORK": "12"}, 1, "; there are: lo 127.0.0.1", id="no_network"),
    ],
)
def test_a_job_ends_as_its_driver_does(tmp_path: Path, cluster: dict, status: int, said: str) -> None:
    job = start(tmp_path, **{"driver": "echo ran", **cluster})
    output = ended(job)
    assert (job.returncode, said in output) == (status, True), output
    assert "ran" not in output.split(), "no driver without its cluster"
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("driver", "number", "env", "requeued"),
    [
        pytest.param(SAVES, None, {"left": "$([[ -e started ]] && echo 599 || echo 7200)"}, True, id="limit_moves"),
        pytest.param(SAVES, signal.SIGUSR1, {"REQUEUE": "0"}, False, id="requeue_off"),
        pytest.param(SAVES, signal.SIGUSR1, {"SLURM_RESTART_COUNT": "100"}, False, id="too_often"),
        pytest.param(SAVES, signal.SIGUSR2, {}, False, id="asked_to_end"),
        pytest.param(SAVES, signal.SIGTERM, {}, False, id="cancelled"),
        pytest.param(DEAF, signal.SIGUSR1, {}, True, id="while_python_reads_its_imports"),
    ],
)
def test_a_signal_saves_and_queues_the_job_again(
    tmp_path: Path, driver: str, number: signal.Signals | None, env: dict[str, str], requeued: bool
) -> None:
    job = start(tmp_path, driver=driver, **env)
    wait_for(tmp_path / "started")
    if number is not None:
        job.send_signal(number)
    output = ended(job)
    assert job.returncode == 85 and ("saved\n" in output) == (driver == SAVES), output
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 7\n" if requeued else ""), output


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_job_that_is_preempted_before_its_driver_runs_starts_over(
    tmp_path: Path, number: signal.Signals, requeued: bool
) -> None:
    job = start(tmp_path, driver="echo ran", doctor="touch looking; while [[ ! -e enough ]]; do sleep 0.05; done")
    wait_for(tmp_path / "looking")
    job.send_signal(number)
    (tmp_path / "enough").touch()
    output = ended(job)
    assert job.returncode == (85 if requeued else 1) and "ran" not in output.split(), output
    assert (tmp_path / "scontrol.log").exists() == requeued, output
    assert_nothing_is_left(tmp_path)


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
    assert (tmp_path / "told").read_text() == "told\n" and "SIGTERM after SIGUSR1" in output, output


def test_a_worker_starts_again_and_its_logs_come_home(tmp_path: Path) -> None:
    """What processes leave in the temporary directory, as a killed engine does its sockets, goes with the job."""
    logs = 'for word; do case $word in --temp-dir=*) dir=${word#*=}/session_2/logs;; esac; done; mkdir -p "$dir"'
    first = "[[ -e once ]] || { touch once; exit 3; }"
    python = fake(tmp_path, "python", f"{logs}; {first}; echo $TRITON_CACHE_DIR >$dir/raylet.out; mktemp; {UNTIL_TERM}")
    env = {"RAY_ADDRESS": "10.0.0.1:20007", "NODE_DISK": str(tmp_path / "s"), "LOGS": str(tmp_path / "logs")}
    quick = fake(tmp_path, "bin/sleep", "exec /usr/bin/sleep 0.05").parent
    env |= {"TMPDIR": str(tmp_path / "a_login_nodes"), "SLURM_JOB_ID": "7", "PATH": f"{quick}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "launch/slurm/node.sh"), "worker", str(python)]
    pipe = subprocess.PIPE
    node = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **env}, stdout=pipe, stderr=pipe, text=True)
    wait_for(tmp_path / "s/dapo-7/ray/session_2/logs/raylet.out")
    node.terminate()
    left, said = node.communicate(timeout=60)
    assert node.returncode == 0 and "ended with 3; it starts again" in said
    assert left.startswith(f"{tmp_path}/s/dapo-7/tmp/")
    (log,) = (tmp_path / "logs").glob("*/raylet.out")
    caches = tmp_path / f"s/dapo-cache-{os.getuid()}"
    assert log.read_text() == f"{caches}/triton\n"
    assert not (tmp_path / "s/dapo-7").exists() and caches.exists()


@pytest.mark.parametrize("script", ["train", "eval"])
def test_directives_are_those_of_one_task_a_node(script: str) -> None:
    text = (ROOT / f"launch/slurm/{script}.sbatch").read_text()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert directives["ntasks-per-node"] == "1" and "exclusive" in directives
    assert ("requeue" in directives) == (script == "train")
    assert directives.get("signal") == ("B:USR1@120" if script == "train" else None), "it serves preemption alone"


@pytest.mark.parametrize(
    ("runtime", "script", "named"),
    [("pyxis", "train", True), ("apptainer", "train", False), ("pyxis", "eval", False)],
)
def test_a_container_holds_nodes_driver_what_they_write_and_the_hubs_caches(
    tmp_path: Path, runtime: str, script: str, named: bool
) -> None:
    here, output, home = tmp_path / "checkout", tmp_path / "shared/run", tmp_path / ("hf" if named else "huggingface")
    other = tmp_path / "data sets"
    for folder in (here, home, here / "hub", other):
        folder.mkdir()
    env = {"HF_HOME": str(home)} if named else {"XDG_CACHE_HOME": str(tmp_path)}
    env |= {"HF_HUB_CACHE": str(here / "hub"), "HF_DATASETS_CACHE": str(other), "PYTHON": ""}
    env |= {"CONTAINER": "image.sqsh", "CONTAINER_RUNTIME": runtime, "CONTAINER_MOUNTS": "/models,/data:/in,/raw:/r:ro"}
    plan = f'echo "asked $*" >&2; echo lead_s 600; echo output_dir {output}'
    said = ended(start(here, driver="echo home $HF_HOME", plan=plan, script=script, **env))
    module = {"train": "plan", "eval": "evaluate"}[script]
    assert f"home {home}\n" in said and f"asked -m dapo.{module} --job +experiment=dapo_qwen32b\n" in said, said
    seen = [str(here), f"{here}/scratch", "/models", "/data:/in", "/raw:/r:ro", str(home), str(other), str(output)]
    if runtime == "pyxis":
        record = (here / "srun.options").read_text()
        seen = [each if ":" in each else f"{each}:{each}" for each in seen]
        before, after = (f"--container-mounts={','.join(mounts)}" for mounts in (seen[:-1], seen))
    else:
        record = (here / "apptainer.log").read_text()
        before, after = (f"exec --nv --bind {','.join(mounts)}" for mounts in (seen[:-1], seen))
    assert record.count(before) == record.count(after) + 1, "the plan alone does not know where the run writes"
    assert record.count(after) >= {"train": 5, "eval": 4}[script], "port, nodes, wait, doctor of a run, driver"
    assert [*(output / "nodes/7.0").glob("*.log")]


def test_an_image_that_was_built_again_is_unpacked_again(tmp_path: Path) -> None:
    """Pyxis takes a container of that name in the image's place. Caches that are not there are not mounted."""
    image, names = tmp_path / "image.sqsh", []
    env = {"CONTAINER": str(image), "PYTHON": "", "HF_HOME": str(tmp_path / "absent"), "HF_HUB_CACHE": "relative"}
    for build in ("old", "newer"):
        image.write_text(build)
        (tmp_path / build).mkdir()
        assert "trained" in ended(start(tmp_path / build, driver="echo trained", **env))
        options = (tmp_path / build / "srun.options").read_text()
        assert "absent" not in options and "relative" not in options
        names.append(set(re.findall(r"--container-name=(\S+)", options)))
    assert [len(each) for each in names] == [1, 1] and names[0] != names[1]


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_run_on_a_real_ray_node_saves_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    """Only srun, scontrol and squeue are stand-ins."""
    from tests.support.runs import SMALL

    run, words = tmp_path / "run", ["+experiment=dapo_tiny", *SMALL, "data.val_files=[]", "trainer.device=cpu"]
    words += [f"trainer.output_dir={run}", "trainer.total_steps=10", "checkpoint.every=1", "eval.every=0"]
    words += ["eval.before_train=false", "eval.after_train=false", "actor.num_workers=1"]
    env = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    env |= {"SLURM_JOB_NUM_NODES": "1", "READY_S": "300", "LEAD_S": "60", "DOCTOR": "0", "OMP_NUM_THREADS": "1"}
    env["RAY_OVERRIDE_RESOURCES"] = '{"CPU": 8}'
    with tempfile.TemporaryDirectory(prefix="d") as disk:  # a short path, for Ray puts sockets below it
        env["NODE_DISK"] = disk
        job = start(tmp_path, *words, sleep='"$@"', **env)
        try:
            wait_for(run / "checkpoints/LATEST", 900)
        finally:
            job.send_signal(signal.SIGUSR1)
            said = ended(job, 300)
        assert job.returncode == 85 and (tmp_path / "scontrol.log").read_text() == "requeue 7\n", said
        job = start(tmp_path, *words, sleep='"$@"', SLURM_RESTART_COUNT="1", **env)
        said = ended(job, 900)
        assert job.returncode == 0 and f"resuming from {run}/checkpoints/step_" in said and "step 10/10" in said, said
        assert os.listdir(disk) == [f"dapo-cache-{os.getuid()}"], "the caches alone stay"
        deadline = time.monotonic() + 30  # Ray's agents look now and then whether their raylet lives
        while left := [each for each in psutil.process_iter(["cmdline"]) if disk in str(each.info)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
    assert all([*(run / f"nodes/7.{i}").glob("*/raylet.out")] for i in (0, 1))
    assert not list((tmp_path / "outputs").glob(".ray-token*"))
