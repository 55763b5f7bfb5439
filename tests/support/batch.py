"""Runs a batch script of launch/slurm on stand-ins for srun, scontrol, squeue and Python that record their words."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REAL = sys.executable
UNTIL_TERM = "trap 'exit 0' TERM; while true; do sleep 0.05; done"
SRUN = """
while [[ $1 == --* ]]; do
  echo "$1" >>srun.options
  case $1 in --output=*) log=${1#*=} && exec >>"${log//%N/node$RANDOM}" 2>&1 ;; esac
  shift
done
[[ ${SLURM_EXPORT_ENV:-ALL} == ALL* ]] || exec env -i PATH="$PATH" "$@"
exec "$@"
"""
SQUEUE = """
[[ ${SLURM_TIME_FORMAT:-standard} != standard ]] || SLURM_TIME_FORMAT=%Y-%m-%dT%H:%M:%S
date --date="@$(($(date +%s) + LEFT))" "+$SLURM_TIME_FORMAT"
"""


def fake(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def start(
    folder: Path,
    *arguments: str,
    driver: str = "",
    node: str = UNTIL_TERM,
    alive: int = 2,
    plan: str = "echo 'lead_s 600'; echo \"output_dir $PWD/outputs/run\"",
    doctor: str = "true",
    left: str = "7200",
    sleep: str = "0.05",
    script: str = "train",
    **env: str,
) -> subprocess.Popen[str]:
    """A batch script on two nodes. driver, node, plan, doctor: bodies of the processes that Python would be; alive:
    nodes that Ray counts; left: seconds of the allocation, a shell word."""
    fakes = folder / "fake"
    shutil.copytree(ROOT / "launch/slurm", folder / "launch/slurm", dirs_exist_ok=True)
    fake(fakes, "scontrol", '[[ $1 == show ]] && echo localhost || echo "$*" >>scontrol.log')
    fake(fakes, "srun", SRUN)
    fake(fakes, "apptainer", 'echo "$*" >>apptainer.log; shift 4; shift; exec "$@"')
    fake(fakes, "squeue", SQUEUE.replace("LEFT", left))
    fake(fakes, "sleep", f"exec /usr/bin/sleep {sleep}")
    cases = (
        f"*ray.scripts*) {node};; *' --job '*) {plan};; *dapo.doctor*) {doctor};; "
        f'*dapo.main_ppo*|*dapo.evaluate*) {driver};; *"import ray"*) echo {alive};; *) exec {REAL} "$@";;'
    )
    python = fake(fakes, "python", f'case "$*" in {cases} esac')
    job = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_ID": "7"}
    job |= {"SLURM_JOB_NODELIST": "n[0-1]", "READY_S": "1", "NODE_DISK": str(folder / "scratch")}
    job |= {"PATH": f"{fakes}:/usr/bin:/bin", "PYTHON": str(python), **env}
    command = ["bash", str(ROOT / f"launch/slurm/{script}.sbatch"), *(arguments or ["+experiment=dapo_qwen32b"])]
    return subprocess.Popen(command, env=job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path: Path, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def ended(job: subprocess.Popen[str], timeout_s: float = 120) -> str:
    try:
        return job.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        job.terminate()
        raise
