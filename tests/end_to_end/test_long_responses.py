"""One step with responses of 20,480 tokens, end to end on CPU: two ranks share each sequence.

The engine is forced to the cap by a model that never ends: its head's row for the stop token points away from a
direction that all embeddings share.
"""

import json
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from dapo.report.log import read_metrics
from dapo.tiny.random_model import make_random_model
from tests.support.runs import command

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(1200)]

RESPONSE, PROMPT = 20_480, 64
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1 if sum(map(ord, solution_str)) % 2 else -1
"""
LONG = (
    *("data.train_batch_size=2", "rollout.n=2", "actor.ppo_mini_batch_size=2", "filter_groups.enable=false"),
    *(f"data.max_response_length={RESPONSE}", "actor.num_workers=2", "actor.ulysses_sequence_parallel_size=2"),
    *(f"actor.max_tokens_per_gpu={(RESPONSE + PROMPT) // 2}", "model.gradient_checkpointing=full"),
    *("reward.overlong_buffer.len=4096", "rollout.vllm.max_num_seqs=4", "trainer.total_steps=1"),
    *("eval.every=0", "eval.before_train=false", "eval.after_train=false", "actor.ppo_epochs=1"),
    "algorithm.kl.reward_coeff=0",
)


def make_endless_model(folder: Path) -> Path:
    make_random_model(folder, tie_word_embeddings=False, max_positions=32_768)
    stop = json.loads((folder / "config.json").read_text())["eos_token_id"]
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] += 1.0
    weights["lm_head.weight"][stop] -= 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_step_with_responses_of_20480_tokens(tmp_path: Path) -> None:
    model, reward = make_endless_model(tmp_path / "model"), tmp_path / "reward.py"
    reward.write_text(REWARD)
    functions = f"reward.functions=[{{path:{reward},name:compute_score}}]"
    line = command(tmp_path / "run", "", *LONG, f"model.path={model}", functions)
    began, largest = time.monotonic(), {}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT)
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        assert time.monotonic() - began < 600, (tmp_path / "out").read_text()
        with suppress(psutil.Error):
            for one in [watched, *watched.children(recursive=True)]:
                name = " ".join(one.cmdline()[:3])[:60]
                largest[name] = max(largest.get(name, 0), one.memory_info().rss)
        time.sleep(0.5)
    assert process.returncode == 0, (tmp_path / "out").read_text()
    print(f"{time.monotonic() - began:.0f} s; bytes by process: {largest}")
    [step] = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "actor/loss" in line]
    print({key: value for key, value in step.items() if key.startswith(("perf/", "parity/", "actor/"))})
    assert step["rollout/response_length_min"] == step["rollout/response_length_max"] == RESPONSE
    assert step["actor/response_tokens"] == 4 * RESPONSE
    assert step["parity/max_abs_logprob_diff"] <= 1e-3 and step["actor/grad_norm"] > 0
    assert max(largest.values()) < 6 << 30
