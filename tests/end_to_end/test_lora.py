"""Real runs with LoRA: real engines sample from merged weights, a stopped run goes on from its adapters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dapo.config.paths import resolve_path
from tests.support.runs import Runs, checkpoint, metrics

pytestmark = [pytest.mark.nightly, pytest.mark.ray, pytest.mark.timeout(1200)]

LORA = ("model.lora.rank=4", "model.lora.alpha=16", "actor.optim.lr=2e-3")
BOUND = 1e-4


def test_engines_follow_the_adapters_and_a_run_goes_on(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.small(tmp_path, "trainer.total_steps=2", *LORA)
    runs.small(tmp_path, "trainer.total_steps=4", "weight_sync.transport=broadcast", *LORA)
    assert "resuming from" in capsys.readouterr().out
    steps = [line for line in metrics(tmp_path) if "actor/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["parity/max_abs_logprob_diff"] <= BOUND for line in steps)
    assert abs(steps[0]["reward/kl_penalty"]) <= 1e-6, "the policy is still the base model"
    assert max(line["reward/kl_penalty"] for line in steps[1:]) < steps[0]["reward/kl_penalty"]

    exported = load_file(checkpoint(tmp_path) / "hf" / "model.safetensors")
    base = load_file(Path(resolve_path("pkg://dapo.tiny/base")) / "model.safetensors")
    adapters = load_file(checkpoint(tmp_path) / "hf" / "adapter" / "adapter_model.safetensors")
    assert exported.keys() == base.keys()
    adapted = {name.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight" for name in adapters}
    assert adapted == {name for name in base if not torch.equal(exported[name], base[name])}
    assert adapted == {name for name in base if name.endswith("_proj.weight")}
