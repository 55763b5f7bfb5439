"""Where the loss scale lies: with the gradients, which are not where the ranks compute if these offload them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dapo.config.schema import Config
from workers.training import update
from workers.training.scaling import FIRST, LossScale
from workers.training.update import Updater


@pytest.mark.parametrize(("offload", "device"), [("none", "cuda"), ("phase", "cuda"), ("host", "cpu")])
def test_the_scale_is_on_the_device_of_the_gradients(monkeypatch, offload, device):
    """A step in float16 with `actor.offload=host` would divide by what its memory held before."""
    asked = []
    monkeypatch.setattr(update, "LossScale", lambda *given: asked.append(given))
    cfg = Config()
    cfg.model.dtype, cfg.actor.offload = "float16", offload
    Updater(nn.Linear(1, 1), None, None, cfg, SimpleNamespace(device="cuda"))
    assert asked == [("float16", device)]


def test_a_scale_in_host_memory_scales_and_divides():
    layer = nn.Linear(2, 1, bias=False)
    scale = LossScale("float16", "cpu")
    assert scale.value == FIRST
    scale.scaled(layer(torch.ones(2)).sum()).backward()
    assert layer.weight.grad.tolist() == [[FIRST, FIRST]]
    scale.unscale(torch.optim.SGD(layer.parameters(), lr=1.0))
    assert layer.weight.grad.tolist() == [[1.0, 1.0]] and not scale.update()
