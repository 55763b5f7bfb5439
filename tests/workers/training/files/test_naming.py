"""What the files hold of a parameter: names as they have them, experts one by one, and what cannot be told. That all
values arrive: test_families."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, Transpose, WeightConverter

from dapo.config.actor import ModelConfig
from dapo.workers.training.files import naming
from dapo.workers.training.files.loading import load_parameters, meta_model
from dapo.workers.training.files.naming import FileNames, Part
from tests.support.training.model_families import FAMILIES, save_model


def made(name: str, directory: Path) -> PreTrainedModel:
    """The model of a family on the meta device, its files in `directory`."""
    save_model(FAMILIES[name], directory)
    return meta_model(ModelConfig(path=str(directory)), torch.float32)


def test_experts_are_single_tensors_of_the_files(tmp_path: Path) -> None:
    model = made("Qwen3-MoE", tmp_path)
    parts, layer = FileNames(model).parts, "model.layers.0.mlp.experts"
    assert parts(f"{layer}.gate_up_proj", (2, 64, 32)) == [
        Part(f"{layer}.0.gate_proj.weight", (32, 32), 0, 0),
        Part(f"{layer}.0.up_proj.weight", (32, 32), 0, 32),
        Part(f"{layer}.1.gate_proj.weight", (32, 32), 1, 0),
        Part(f"{layer}.1.up_proj.weight", (32, 32), 1, 32),
    ]
    file, name = tmp_path / "model.safetensors", f"{layer}.3.up_proj.weight"
    save_file({k: v for k, v in load_file(file).items() if k != name}, file, metadata={"format": "pt"})
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match=rf"1 of 25 parameters are not in its safetensors files: {name}; the files"):
        load_parameters(model.named_parameters(), str(tmp_path), model.base_model_prefix, parts)


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param([Transpose(1, 2)], id="turned"),
        pytest.param([MergeModulelist(dim=1)], id="side_by_side"),
        pytest.param([MergeModulelist(dim=0), Concatenate(dim=2)], id="by_columns"),
    ],
)
def test_what_is_made_in_another_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operations: list[ConversionOps]
) -> None:
    model = made("Llama", tmp_path)
    other = WeightConverter(["mlp.old.*.weight"], "mlp.up_proj.weight", operations)
    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda *args, **kwargs: [other])
    message = r"LlamaForCausalLM makes model.layers.0.mlp.up_proj.weight, model.layers.1.* of mlp.old.\*.weight in the"
    with pytest.raises(ValueError, match=message):
        FileNames(model)
