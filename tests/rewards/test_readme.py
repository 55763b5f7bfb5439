"""What `dapo/rewards/README.md` shows: its function is scored, its commands are run, its tables name everything."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dapo.config.reward import RewardFunctionConfig
from dapo.rewards.calling.functions import RewardFunctions
from dapo.rewards.calling.loading import READY

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "dapo/rewards/README.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands need beside them: the function of the README, and a data file."""
    made = tmp_path_factory.mktemp("readme")
    (program,) = blocks("python")
    (made / "my_reward.py").write_text(program)
    rows = [{"data_source": "mine", "prompt": [], "reward_model": {"ground_truth": truth}} for truth in ("42", "43")]
    (made / "my_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def test_its_function_gets_its_known_answers_right(folder: Path) -> None:
    loaded = RewardFunctions([RewardFunctionConfig(path=str(folder / "my_reward.py"), kwargs={"strict": True})])
    assert [loaded.score_alone(label, canary) - canary.score for label, canary in loaded.canaries()] == [0.0, 0.0]
    assert loaded.reads_last == 300
    score = loaded.score("mine", "Answer: Yes", "yes")
    assert (score.accuracy, score.reward, score.prediction) == (0.0, -1.0, "Yes")
    assert score.metrics == {"compute_score/answer_chars": 3.0}


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_run(folder: Path, command: str) -> None:
    python, *arguments = shlex.split(command)
    assert python == "python"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    says = next(
        (word for word in ("path: my_reward.py", "path: code", "path: judge") if word in command), "2 of 2 right"
    )
    assert says in done.stdout


def test_its_tables_are_complete() -> None:
    first_columns = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert set(READY) <= set(first_columns)
    assert set(RewardFunctionConfig.__dataclass_fields__) <= set(first_columns)
