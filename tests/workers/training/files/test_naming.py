"""What the files hold of a parameter: names as they have them, experts one by one, and what cannot be told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, Transpose, WeightConverter

from dapo.config.actor import ModelConfig
from tests.support.training.model_families import FAMILIES, save_model
from workers.training.files import naming
from workers.training.files.loading import load_parameters, meta_model
from workers.training.files.naming import FileNames, Part

LAYER = "model.layers.0.mlp.experts"


def made(name: str, directory: Path) -> PreTrainedModel:
    """The model of a family on the meta device, its files in `directory`."""
    save_model(FAMILIES[name], directory)
    return meta_model(ModelConfig(path=str(directory)), torch.float32)


def test_experts_are_single_tensors_of_the_files(tmp_path: Path) -> None:
    parts = FileNames(made("Qwen3-MoE", tmp_path)).parts
    assert parts(f"{LAYER}.gate_up_proj", (2, 64, 32)) == [
        Part(f"{LAYER}.0.gate_proj.weight", (32, 32), 0, 0),
        Part(f"{LAYER}.0.up_proj.weight", (32, 32), 0, 32),
        Part(f"{LAYER}.1.gate_proj.weight", (32, 32), 1, 0),
        Part(f"{LAYER}.1.up_proj.weight", (32, 32), 1, 32),
    ]
    assert [part.start for part in parts(f"{LAYER}.down_proj", (3, 32, 32))] == [0, 0, 0]
    assert parts("lm_head.weight", (64, 32)) == [Part("lm_head.weight", (64, 32))]


def test_experts_of_a_renamed_module_have_the_files_name(tmp_path: Path) -> None:
    parts = FileNames(made("Mixtral", tmp_path)).parts
    experts = "model.layers.0.block_sparse_moe.experts"
    assert [part.name for part in parts(f"{LAYER}.gate_up_proj", (1, 96, 32))] == [
        f"{experts}.0.w1.weight",
        f"{experts}.0.w3.weight",
    ]
    assert parts("model.layers.1.mlp.gate.weight", (4, 32))[0].name == "model.layers.1.block_sparse_moe.gate.weight"


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


UP = f"{LAYER}.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda state: {k: v for k, v in state.items() if k != UP},
            rf"1 of 25 parameters are not in its safetensors files: {UP}; the files hold",
            id="missing",
        ),
        pytest.param(
            lambda state: state | {UP: torch.ones(16, 32)},
            rf"model.safetensors .*: {UP} has shape \[16, 32\], and config.json asks for \[32, 32\]",
            id="shape",
        ),
        pytest.param(lambda state: state | {UP: state[UP].to(torch.int8)}, rf"{UP} is of type I8", id="quantised"),
    ],
)
def test_a_wrong_tensor_of_one_expert_is_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], message: str
) -> None:
    model = made("Qwen3-MoE", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match=message):
        load_parameters(model.named_parameters(), str(tmp_path), model.base_model_prefix, FileNames(model).parts)


def test_a_part_is_where_it_says(tmp_path: Path) -> None:
    full = torch.arange(2 * 4 * 3).reshape(2, 4, 3)
    part = Part("any", (2, 3), expert=1, start=2)
    assert torch.equal(part.of(full), full[1, 2:4])
    assert part.of(full).data_ptr() == full[1, 2:].data_ptr(), "a view"
    assert replace(part, expert=None).of(full) is full
