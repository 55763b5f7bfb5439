"""Shapes against transformers' own modules on the meta device, and FLOPs against torch's counter."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from dapo.config.facts.model_shape import UnknownShape, positions, read_config, read_shape, shape_of

ROOT = Path(__file__).resolve().parents[2]
# As the hub counts them in the published safetensors files.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}
SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 500}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def yarn(original: int) -> dict:
    return {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}}


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        pytest.param({}, float("inf"), id="nothing"),
        pytest.param({"max_position_embeddings": 4096, "n_positions": 1024}, 1024, id="the_least"),
        pytest.param({"max_position_embeddings": 4096, "model_max_length": 8192}, 8192, id="the_model_says_it"),
        pytest.param({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384, id="linear"),
        pytest.param({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 8192, id="dynamic"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096, id="default"),
        pytest.param({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096, id="llama3"),
        pytest.param(yarn(4096), 16_384, id="yarn_not_yet_multiplied"),
        pytest.param(yarn(1024), 4096, id="yarn_multiplied"),
        pytest.param({"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {}}}, 32_768, id="by_kinds"),
        pytest.param({"text_config": {"max_position_embeddings": 2048}, "vision_config": {}}, 2048, id="of_the_text"),
        pytest.param({"text_config": {"rope_scaling": LINEAR}}, 32_768, id="scaling_of_the_text"),
    ],
)
def test_positions_of_a_model(said: dict, tokens: float) -> None:
    assert positions({"max_position_embeddings": 4096} | said if said else {}) == tokens


def build(config, device="meta"):
    kwargs = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **kwargs), attn_implementation="eager"
        )


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_shapes_have_the_published_parameters(name):
    shape = read_shape(name)
    assert shape.parameters == PUBLISHED[name]
    assert shape.parameters == build(read_config(name)).num_parameters()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral"])
def test_parameters_of_each_kind(kind, tied):
    config = SMALL | EXPERTS | {"model_type": kind, "tie_word_embeddings": tied}
    if kind.startswith("qwen3"):
        config["head_dim"] = 32
    assert shape_of(config, kind).parameters == build(config).num_parameters()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "mixtral"])
def test_flops_are_what_torch_counts(kind):
    """torch counts the whole of the score matrix, twice what causal attention needs."""
    config = SMALL | EXPERTS | {"model_type": kind, "head_dim": 16}
    shape, length = shape_of(config, "small"), 96
    model = build(config, "cpu")
    if shape.experts:
        model.set_experts_implementation("eager")  # torch counts no grouped products
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long))
    expected = shape.forward_flops([length]) + shape.attention_flops(length)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.002)  # the rest: rotary frequencies
    assert shape.forward_flops([length], head_tokens=0) == shape.forward_flops([length]) - length * shape.head_flops


def test_attention_equals_the_rest_where_it_says():
    shape = read_shape("Qwen/Qwen2.5-32B")
    length = shape.attention_equals_rest_tokens
    assert shape.attention_flops(length) == pytest.approx(length * shape.flops_per_token, rel=1e-4)


def test_a_directory_and_a_package_are_read(tmp_path):
    assert read_shape("pkg://dapo.tiny/base") == read_shape(str(ROOT / "dapo/tiny/base"))
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama"}))
    assert read_shape(str(tmp_path)).num_layers == 3


def test_the_hub_cache_is_read(tmp_path, monkeypatch):
    import huggingface_hub.constants

    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(SMALL | {"model_type": "mistral"}))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_shape("some/model").hidden_size == 64


SPARSE = SMALL | EXPERTS | {"model_type": "qwen3_moe"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        pytest.param(SMALL | EXPERTS | {"model_type": "qwen2_moe"}, "the shape of a qwen2_moe model", id="experts"),
        pytest.param(SMALL | {"model_type": "qwen3_moe", "num_experts": 8}, "lacks moe_intermediate_size", id="width"),
        pytest.param(SPARSE | {"decoder_sparse_step": 2}, "sparse_step is set", id="every_second"),
        pytest.param(SPARSE | {"mlp_only_layers": [0]}, "mlp_only_layers is set", id="some_dense"),
        pytest.param({"model_type": "qwen2", "hidden_size": 64}, "lacks intermediate_size", id="missing"),
        pytest.param(SMALL | {"model_type": "llama", "attention_bias": True}, "attention_bias is set", id="bias"),
        pytest.param({}, "None", id="empty"),
    ],
)
def test_what_is_not_known_is_said(config, says):
    with pytest.raises(UnknownShape, match=says):
        shape_of(config, "m")


@pytest.mark.parametrize("name", ["nobody/nothing", "/no/such/dir"])
def test_a_model_that_is_not_there(name):
    with pytest.raises(ValueError, match=r"`model.path` .*hf download.*Qwen/Qwen2.5-7B"):
        read_shape(name)
