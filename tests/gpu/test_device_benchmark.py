"""The benchmark of updates on one GPU, with the tiny model's shape."""

import json
from pathlib import Path

import pytest
import torch

from dapo.bench.__main__ import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.ray
def test_a_row_for_this_device(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    words = "device --models pkg://dapo.tiny/base --tokens 256 --sequences 2 --micro-batches 2 --repeats 1 --output"
    main([*words.split(), str(output)])
    row = json.loads(output.read_text())
    assert row["device"] == torch.cuda.get_device_name() and row["dtype"] == "bfloat16"
    assert row["tokens_per_s"] == pytest.approx(512 / row["seconds"])
    assert row["grad_norm"] > 0
