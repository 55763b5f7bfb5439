"""Every bash command of the READMEs, pasted in their order into one fresh copy of the checkout. The experiments of the
copy are smaller, so that the names of run directories are those of the texts."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pyarrow.json as json
import pyarrow.parquet as parquet
import pytest
from omegaconf import OmegaConf

from tests.repository.test_texts import ROOT, tracked_texts

COMMAND_S = 600
# What is left out, and why; the first that matches is told.
LEFT_OUT = {
    "it makes, enters or tests the environment": r"^(source|pip|python3)\b|launch/(install|test)\.sh|pytest|/tmp/next",
    "a cluster": r"^(sbatch|scancel|ray|kubectl|sky|dstack)\b|^(cluster|CONTAINER)=|launch/ray_|ray_address=",
    "Docker": r"\bdocker\b|RAY_TOKEN",
    "the network": r"\b(curl|git clone|hf|wget)\b|smollm2|\b(Qwen|HuggingFaceTB|BytedTsinghua-SIA|openai)/|push_to_hub",
    "a GPU": r"1gpu|cuda|bench device|--gpu|(main_ppo|train|doctor|--run) (\+?experiment=)?(dapo_qwen|ablation_7b)",
    "many runs, or a measurement": r"\bdapo[. ](ablation|bench|simulate)\b|DAPO_FAULT",
    "it ends with Ctrl-C": r"--serve|^tensorboard|mkdocs serve|jupyter",
    "a name to be filled in": r"--config-dir own|\b(NAME|FILE|HEAD|VERSION|JOBID|OVERRIDES|RUN|QUESTION|KEY|VALUE)\b",
}
SMALL = {
    "data.train_batch_size": 4,
    "data.gen_batch_size": 8,
    "actor.ppo_mini_batch_size": 2,
    "actor.num_workers": 1,
    "rollout.n": 4,
    "eval": {"n": 1, "every": 0, "before_train": False, "after_train": False},
    "checkpoint.every": 1,
    "trainer.total_steps": 2,
}
RUN = Path("outputs/dapo_tiny")


def commands() -> list[str]:
    """Commands of all bash blocks, the first page first; a command may have several lines."""
    texts = tracked_texts()
    readmes = sorted((name for name in texts if name.endswith("README.md")), key=lambda name: (name.count("/"), name))
    blocks = [block for name in readmes for block in re.findall(r"^```bash\n(.*?)^```", texts[name], re.M | re.S)]
    return [command for block in blocks for command in split(block)]


def split(block: str) -> list[str]:
    """The commands of a block: a line each, but for continued lines and here-documents."""
    found: list[str] = []
    ends = ""
    for line in block.splitlines():
        if ends or found and found[-1].endswith("\\"):
            found[-1] += f"\n{line}"
            ends = "" if line.strip() == ends else ends
        elif line.strip() and not line.startswith("#"):
            found.append(line)
            ends = "".join(re.findall(r"<<-?\s*['\"]?(\w+)", line))
    return found


def test_lines_that_belong_together_are_one_command() -> None:
    assert split("a \\\n  b  # c\n\n# d\ncat > e <<'EOF'\nf\n\nEOF\ng") == [
        "a \\\n  b  # c",
        "cat > e <<'EOF'\nf\n\nEOF",
        "g",
    ]


def why_left_out(command: str, checkout: Path, search: str) -> str:
    bare = re.sub(r"\s+#.*", "", command)
    reason = next((reason for reason, what in LEFT_OUT.items() if re.search(what, bare)), "")
    files = re.findall(r"[\w./-]+\.(?:jsonl|parquet|py|sh|csv)\b", "" if "<<" in bare else bare)
    own = [name for name in files if not (checkout / name).exists()]
    program = bare.split()[0]
    own += [] if "=" in program or shutil.which(program, path=search) else [program]
    return reason or (f"the reader's own {own[0]}" if own else "")


def fitted(command: str, checkout: Path) -> str:
    """The command with numbers and paths that this smaller run has."""
    run = checkout / RUN
    exports = sorted(run.glob("checkpoints/step_*/hf"))
    if exports:
        command = re.sub(r"\bDIR\b", str(exports[-1]), command)
    command = command.replace("RUN_DIR ...", str(RUN))
    if (run / "samples.sqlite").exists():
        with sqlite3.connect(run / "samples.sqlite") as store:
            draw, prompt, step = store.execute("SELECT draw, prompt, step FROM groups ORDER BY draw LIMIT 1").fetchone()
        for word, number in (("draw", draw), ("prompt", prompt), ("step", step), ("--step", 2)):
            command = re.sub(rf"(?<=\s){word} \d+", f"{word} {number}", command)
    return command


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pasted") / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name, follow_symlinks=False)
    for path in (root / "config" / "experiment").glob("*_tiny*.yaml"):
        text = path.read_text()
        tree = OmegaConf.create(text)
        for key, value in SMALL.items():
            if path.stem == "dapo_tiny" or OmegaConf.select(tree, key) is not None:
                OmegaConf.update(tree, key, value, force_add=True)
        path.write_text("# @package _global_\n" + OmegaConf.to_yaml(tree))
    python = re.findall(r"^```python\n(.*?)^```", (root / "README.md").read_text(), re.M | re.S)
    (root / "my_reward.py").write_text(next((block for block in python if "def compute_score" in block), ""))
    (root / "my_data.jsonl").write_text('{"prompt": "2+3=", "answer": "5"}\n{"prompt": "4+3=", "answer": "7"}\n')
    parquet.write_table(json.read_json(root / "my_data.jsonl"), root / "my_data.parquet")
    (root / "bin").mkdir()
    (root / "bin" / "dapo").write_text(f'#!/bin/sh\nexec {sys.executable} -m dapo "$@"\n')
    (root / "bin" / "dapo").chmod(0o755)
    return root


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(7200)
def test_every_command_works_when_pasted_in_order(checkout: Path) -> None:
    search = f"{checkout / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": search, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    failed, ran = [], []
    for command in commands():
        quickstart = command.startswith("bash launch/quickstart.sh")
        if why := "" if quickstart else why_left_out(command, checkout, search):
            print(f"left out ({why}): {command.splitlines()[0]}")
            continue
        if quickstart:  # without the installation, which tests/launch/test_install.py has
            command = command.replace("bash launch/quickstart.sh", "python -m dapo.main_ppo +experiment=dapo_tiny")
        line = fitted(command, checkout)
        done = subprocess.run(
            ["bash", "-c", line], cwd=checkout, env=env, capture_output=True, text=True, timeout=COMMAND_S
        )
        print(f"{done.returncode}: {line}")
        ran.append(line)
        if done.returncode:
            failed.append(f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    assert not failed, "\n\n".join(failed)
    assert len(ran) > 20 and (checkout / RUN / "summary.json").exists()
