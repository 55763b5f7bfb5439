"""Which memory a rank uses for what on a GPU, and that no operation meets tensors of two devices: with a GPU that has
no values (`tests/support/training/stand_in_gpu.py`)."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dapo.workers.training.optimizer import _pinned
from tests.support.training.stand_in_gpu import CASES, NAME


def test_on_a_gpu_a_rank_updates_and_gathers_weights_without_mixing_devices(model_dir: Path) -> None:
    """Two clipped optimizer steps with a reference policy; attention is the GPU's kernel."""
    program = [sys.executable, "-m", "tests.support.training.stand_in_gpu", str(model_dir)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [tuple(each["case"]) for each in found] == CASES
    for each in found:
        offload, rank, _ = each["case"]
        home = "cpu" if offload == "host" else NAME
        assert each["buffers"] == each["full"] == [NAME]
        assert each["shards"] == [home]
        assert each["reference"] == [home if rank else "cpu"]  # its own model waits on the host
        between = "cpu" if offload == "phase" else home
        assert each["moments"] == [[between], [home], [between]]
        assert each["varlen"]


@pytest.mark.parametrize("refused", [False, True])
def test_the_answer_of_the_driver_that_pins_moments(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """Any enum of torch's C++ side is true, also the one of value 0."""
    answer = dist.ReduceOp.RedOpType.AVG if refused else dist.ReduceOp.RedOpType.SUM
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *given: answer))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        value = DTensor.from_local(torch.ones(8), init_device_mesh("cpu", (1,)))
        if refused:
            with pytest.raises(RuntimeError, match=r"does not pin 32 bytes of host memory \(error 1\)"):
                _pinned(value)
        else:
            assert torch.equal(_pinned(value).to_local(), torch.ones(8))
    finally:
        dist.destroy_process_group()
