"""Which memory a rank uses for what on a GPU, and that no operation meets tensors of two devices: with a GPU that has
no values (`tests/support/training/stand_in_gpu.py`)."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.training.plain_reference import make_model
from tests.support.training.stand_in_gpu import CASES, NAME


def test_on_a_gpu_a_rank_updates_and_sends_weights_without_mixing_devices(tmp_path: Path) -> None:
    """Two clipped optimizer steps with a reference policy, then all buckets; attention is the GPU's kernel."""
    model = make_model(tmp_path / "model", tied=False)
    program = [sys.executable, "-m", "tests.support.training.stand_in_gpu", str(model)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [tuple(each["case"]) for each in found] == CASES
    for each in found:
        offload, rank, _ = each["case"]
        home = "cpu" if offload == "host" else NAME
        assert each["buffers"] == each["full"] == [NAME]
        assert each["shards"] == each["gradients"] == [home]
        assert each["reference"] == [home if rank else "cpu"]  # its own model waits on the host
        between = "cpu" if offload == "phase" else home
        assert each["moments"] == [[between], [home], [between]]
        assert each["varlen"] and not each["failures"]
