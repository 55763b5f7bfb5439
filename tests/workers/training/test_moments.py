"""Moments in pinned host memory: what the CUDA driver answers is understood, without a GPU."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from workers.training.moments import _pinned


@pytest.mark.parametrize("refused", [False, True])
def test_the_answer_of_the_driver(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """Any enum of torch's C++ side is true, also the one of value 0."""
    answer = dist.ReduceOp.RedOpType.AVG if refused else dist.ReduceOp.RedOpType.SUM
    assert bool(answer) and (int(answer) != 0) == refused
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
