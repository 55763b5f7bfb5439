"""The program on one GPU, from the command to the exported model, and the benchmark of updates there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dapo.tools.bench.__main__ import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ray,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 3


@pytest.mark.timeout(900)
def test_a_few_steps_of_dapo_tiny_1gpu(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [f"trainer.output_dir={run}", f"trainer.total_steps={STEPS}"]
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
        assert line["perf/sleep_s"] >= 0
    assert list(run.rglob("model.safetensors"))


def test_the_benchmark_of_updates_writes_a_row_for_this_device(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    words = "device --models pkg://dapo.tiny/base --tokens 256 --sequences 2 --micro-batches 2 --repeats 1 --output"
    main([*words.split(), str(output)])
    row = json.loads(output.read_text())
    assert row["device"] == torch.cuda.get_device_name() and row["dtype"] == "bfloat16"
    assert row["tokens_per_s"] == pytest.approx(512 / row["seconds"])
    assert row["grad_norm"] > 0
