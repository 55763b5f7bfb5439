"""Weights from safetensors: the same as transformers loads, each rank its own rows, and errors that say what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from dapo.config.actor import ModelConfig
from dapo.workers.training.files.loading import load_buffers, load_parameters, meta_model


def load(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Loads as `workers.training.fsdp` does, unsharded."""
    model = meta_model(ModelConfig(path=str(path)), dtype)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan)
    model.tie_weights()
    load_buffers(model, str(path))
    load_parameters(model.named_parameters(remove_duplicate=False), str(path), model.base_model_prefix)
    return model


def assert_same(found: PreTrainedModel, wanted: PreTrainedModel) -> None:
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, kind)()), dict(getattr(wanted, kind)())
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
        assert [name for name in theirs if ours[name].dtype != theirs[name].dtype] == []


@pytest.fixture(scope="module")
def models(tied_dir: Path, model_dir: Path) -> dict[str, Path]:
    return {"tied": tied_dir, "untied": model_dir}


def rewrite(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """A copy of a model with other tensors in its file."""
    for file in source.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_tensors_are_those_that_transformers_loads(models: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    assert_same(load(models[name], dtype), AutoModelForCausalLM.from_pretrained(models[name], dtype=dtype))


def test_several_files_scaled_rotary_embeddings_and_a_generation_config(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": 40}
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, rope_parameters=rope)
    saved = AutoModelForCausalLM.from_config(config).bfloat16()
    saved.generation_config.temperature, saved.generation_config.do_sample = 0.25, True
    saved.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = load(tmp_path)
    assert_same(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert model.generation_config.temperature == 0.25


def test_a_buffer_that_nothing_fills_is_named(models: dict[str, Path]) -> None:
    """Code of a model's own may make one where it is built alone, which was without memory."""
    model = meta_model(ModelConfig(path=str(models["tied"])), torch.float32)
    model.model.register_buffer("angles", torch.ones(4, device="meta"), persistent=False)
    model.to_empty(device="cpu")
    with pytest.raises(
        ValueError, match=r"`model.path` \(.*\): nothing fills the buffers model.angles: .*`_init_weights`"
    ):
        load_buffers(model, str(models["tied"]))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda state: {k.removeprefix("model."): v for k, v in state.items()}, id="lacks_the_prefix"),
        pytest.param(lambda state: {f"model.{k}": v for k, v in state.items()}, id="repeats_the_prefix"),
        pytest.param(lambda state: state | {"rotary.inv_freq": torch.ones(2)}, id="more_than_needed"),
        pytest.param(lambda state: {k: v.double() for k, v in state.items()}, id="double"),
    ],
)
def test_files_that_differ_in_form(models: dict[str, Path], tmp_path: Path, change: Callable[..., object]) -> None:
    wanted = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float32)
    assert_same(load(rewrite(models["untied"], tmp_path, change)), wanted)  # type: ignore[arg-type]


def test_a_tied_weight_may_be_stored_under_either_name_or_twice(models: dict[str, Path], tmp_path: Path) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    wanted = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32)
    twice = rewrite(models["tied"], tmp_path, lambda state: state | {head: state[embedding].clone()})
    assert_same(load(twice), wanted)
    assert_same(load(rewrite(twice, twice, lambda state: {k: v for k, v in state.items() if k != embedding})), wanted)
    rewrite(models["tied"], tmp_path, lambda state: state | {head: state[embedding] + 1})
    with pytest.raises(ValueError, match=r"ties model.embed_tokens.weight and lm_head.weight.*`tie_word_embeddings`"):
        load(tmp_path)


NORM = "model.norm.weight"


def test_wrong_tensors_are_named(models: dict[str, Path], tmp_path: Path) -> None:
    for tensor, message in (
        (None, rf"1 of 27 parameters are not in its safetensors files: {NORM}; the files hold lm_head.weight"),
        (torch.ones(31), rf"model.safetensors .*: {NORM} has shape \[31\], and config.json asks for \[32\]"),
        (torch.ones(32, dtype=torch.int8), rf"model.safetensors .*: {NORM} is of type I8, .* not quantised"),
    ):
        rewrite(models["untied"], tmp_path, lambda state, tensor=tensor: with_norm(state, tensor))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def with_norm(state: dict[str, torch.Tensor], tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    others = {name: value for name, value in state.items() if name != NORM}
    return others if tensor is None else others | {NORM: tensor}


def test_wrong_files_are_named(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((models["tied"] / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"neither model.safetensors nor .* but pytorch_model.bin; .*save_pretrained"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NORM: "model-1.safetensors"}}))
    with pytest.raises(ValueError, match=r"index.json names model-1.safetensors, which is not there"):
        load(tmp_path)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index.json cannot be read"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((models["tied"] / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors .* cannot be read as safetensors"):
        load(tmp_path)


def test_a_hub_name_is_found_in_the_cache(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--example--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in models["tied"].iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (tmp_path / "models--example--tiny" / "refs").mkdir()
    (tmp_path / "models--example--tiny" / "refs" / "main").write_text("0" * 40)
    assert_same(load("example/tiny"), AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32))
    with pytest.raises(ValueError, match=r"`model.path` \(example/none\) has neither model.safetensors nor"):
        load_parameters([], "example/none", "model")
