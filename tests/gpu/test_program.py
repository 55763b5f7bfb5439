"""The program on one GPU, from the command to the exported model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 3


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("colocate", ["memory", "time"])
def test_a_few_steps_of_dapo_tiny_1gpu(tmp_path: Path, colocate: str) -> None:
    run = tmp_path / "run"
    words = [f"trainer.output_dir={run}", f"trainer.total_steps={STEPS}", f"trainer.colocate={colocate}"]
    words += ["eval.before_train=false", "eval.n=1", "rollout.vllm.enforce_eager=true", "trainer.ray_address=local"]
    program = [sys.executable, "-m", "dapo.main_ppo", "+experiment=dapo_tiny_1gpu", *words]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/loss" in line]
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    for line in steps:
        assert line["actor/grad_norm"] > 0 and line["parity/mean_abs_logprob_diff"] <= 0.01
        assert line["perf/engine/tokens_per_s_per_gpu"] > 0 and line["perf/rank/gpu_peak_bytes"] > 0
        assert ("perf/sleep_s" in line) == (colocate == "time")
    assert list(run.rglob("model.safetensors"))
