"""`smollm2_cpu` at its smallest size with random weights of SmolLM2's shape; and the run itself, for which the model is
needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from dapo.report.log import read_metrics
from dapo.tiny.model import save_model
from dapo.tiny.tokenizer import make_tokenizer

SHAPE = Path(__file__).resolve().parents[2] / "config/models/HuggingFaceTB--SmolLM2-135M-Instruct.json"
SMALLEST = (
    *("data.train_batch_size=2", "data.gen_batch_size=4", "data.max_response_length=8", "rollout.n=2", "eval.n=1"),
    *("actor.ppo_mini_batch_size=1", "reward.overlong_buffer.len=2", "filter_groups.enable=false"),
    *("eval.before_train=false", "eval.after_train=false", "checkpoint.every=0", "trainer.total_steps=1"),
)

pytestmark = [pytest.mark.ray]


def train(folder: Path, *overrides: str, timeout_s: float) -> list[dict[str, float]]:
    """The lines of the run's metrics."""
    line = [sys.executable, "-m", "dapo.main_ppo", "+experiment=smollm2_cpu", f"trainer.output_dir={folder}"]
    done = subprocess.run([*line, *overrides], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.nightly
def test_one_step_with_random_weights_of_its_shape(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(SHAPE, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    save_model(LlamaForCausalLM(config), tokenizer, tmp_path / "model")
    longest = "data.max_prompt_length=256"  # this tokenizer's tokens are characters
    lines = train(tmp_path / "run", f"model.path={tmp_path / 'model'}", longest, *SMALLEST, timeout_s=600)
    [step] = [line for line in lines if "actor/loss" in line]
    assert step["actor/optimizer_steps"] == 2 and 0 < step["parity/mean_abs_logprob_diff"] < 1e-4


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif("SMOLLM2" not in os.environ, reason="SMOLLM2 names no folder of SmolLM2-135M-Instruct")
def test_it_learns_word_problems(tmp_path: Path) -> None:
    lines = train(tmp_path / "run", f"model.path={os.environ['SMOLLM2']}", timeout_s=4 * 3600)
    before, *_, after = (line["eval/accuracy"] for line in lines if "eval/accuracy" in line)
    assert before < 0.05 and after > 0.5
