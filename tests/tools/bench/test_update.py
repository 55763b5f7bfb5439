"""The benchmark of updates on a GPU: it runs on a CPU and gives figures."""

import json
from pathlib import Path

import pytest
import torch

from dapo.config.facts.model_shape import read_shape
from dapo.tools.bench.__main__ import main

TINY = "pkg://dapo.tiny/base"


@pytest.mark.ray
@pytest.mark.nightly
def test_the_part_for_a_gpu_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.jsonl"
    options = {"--tokens": "256", "--sequences": "2", "--micro-batches": "2", "--repeats": "1", "--peak-flops": "1e12"}
    words = [word for pair in options.items() for word in pair]
    main(["device", "--models", TINY, "--device", "cpu", "--output", str(output), *words])
    row = json.loads(output.read_text())
    assert row == json.loads(capsys.readouterr().out)
    shape = read_shape(TINY)
    assert row["parameters"] == shape.parameters
    assert row["tokens_per_s"] == pytest.approx(512 / row["seconds"])
    # 4 sequences of 128 tokens; the head runs at the 112 of a response; backward counts twice.
    expected = 3 * shape.forward_flops([128] * 4, head_tokens=4 * 112)
    assert row["model_flops"] == expected
    assert row["mfu"] == pytest.approx(expected / row["seconds"] / 1e12)
    assert row["peak_bytes"] > 4 * 4 * shape.parameters  # parameters, gradients, two moments
    assert row["grad_norm"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_without_the_device_it_is_one_message() -> None:
    with pytest.raises(SystemExit, match=r"^dapo.bench: `--device` \(cuda\) .* torch sees no CUDA device"):
        main(["device"])
