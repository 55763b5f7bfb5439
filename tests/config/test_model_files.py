"""What config.json and the files of a model, or of a reward model, say against a run before any worker starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dapo.config import fields
from dapo.config.facts.model_files import tensors, weights_problems
from dapo.config.rules.model import actor, served
from dapo.config.rules.reward import reward_model
from dapo.config.schema import Config

TINY = "pkg://dapo.tiny/base"  # 4,096 positions
WINDOW = {"sliding_window": 4096}
SCORER = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
SCORER |= {"max_position_embeddings": 32768}


def config(**sections: dict[str, Any]) -> Config:
    cfg = Config()
    cfg.model.path = "Qwen/Qwen2.5-7B"  # 28 heads, 4 key-value heads; its shape is in the repository
    cfg.actor.num_workers = 8
    for section, given in sections.items():
        for key, value in given.items():
            setattr(getattr(cfg, section), key, value)
    return cfg


def directory(folder: Path, content: Any) -> str:
    """Writes a config.json, unless the content is None."""
    if content is not None:
        (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "holds no config.json", id="no_config"),
        pytest.param("{", "config.json cannot be read", id="not_json"),
        pytest.param({"num_attention_heads": 6}, "must divide the 6 attention heads", id="heads"),
        pytest.param({"logits_scaling": 8.0}, "changes its logits after the head (logits_scaling: 8.0", id="scaled"),
        pytest.param({"logit_scale": 1.0, "final_logit_softcapping": None}, None, id="scaled_by_one"),
        pytest.param({"attn_logit_softcapping": 50.0}, "caps attention scores (attn_logit_softcapping: 50", id="caps"),
        pytest.param(WINDOW, "see 4096 tokens (sliding_window in config.json), fewer than", id="window"),
        pytest.param(WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}, "see 4096 tokens", id="layer"),
        pytest.param(WINDOW | {"layer_types": ["full_attention"]}, None, id="no_layer"),
        pytest.param(WINDOW | {"use_sliding_window": False}, None, id="window_off"),
        pytest.param(WINDOW | {"max_window_layers": 28, "num_hidden_layers": 28}, None, id="above_all_layers"),
        pytest.param({"sliding_window": 22_528}, None, id="wide_enough"),
        pytest.param({"sliding_window": None}, None, id="no_window"),
    ],
)
def test_what_the_actors_do_not_compute_is_refused(tmp_path: Path, content: Any, message: str | None) -> None:
    ranks = {"ulysses_sequence_parallel_size": 4, "max_tokens_per_gpu": 22_528}
    found = list(actor(config(model={"path": directory(tmp_path, content)}, actor=ranks)))
    assert len(found) == (message is not None) and all(message in problem for problem in found), found


def test_another_attention_may_compute_a_window(tmp_path: Path) -> None:
    path = directory(tmp_path, WINDOW | {"attn_logit_softcapping": 50.0})
    assert list(actor(config(model={"path": path, "attn_implementation": "flash_attention_2"}))) == []


def dynamic(**rope: Any) -> dict[str, Any]:
    """A model with 4,096 positions that changes its frequencies by the length of a sequence."""
    return {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 8.0}} | rope


@pytest.mark.parametrize(
    ("content", "longest", "refused"),
    [
        (dynamic(), 4097, True),
        (dynamic(), 4096, False),
        (dynamic(rope_parameters={"rope_type": "dynamic", "factor": 8.0}), 4097, True),
        (dynamic(rope_parameters={"full_attention": {"rope_type": "dynamic", "factor": 8.0}}), 4097, True),
        (dynamic(rope_scaling={"type": "linear", "factor": 8.0}), 4097, False),
        ({"text_config": dynamic()}, 4097, True),
    ],
    ids=["beyond", "within", "another_key", "by_kinds_of_layers", "linear", "of_text"],
)
def test_frequencies_that_change_with_the_length_are_refused_where_they_do(
    tmp_path: Path, content: dict[str, Any], longest: int, refused: bool
) -> None:
    """transformers makes them anew for each length, and vLLM once, for the positions that the model was trained on."""
    data = {"max_prompt_length": 1000, "max_response_length": longest - 1000}
    cfg = config(model={"path": directory(tmp_path, content)}, data=data)
    for found in (list(actor(cfg)), list(served(cfg))):
        assert len(found) == refused
        assert all("dynamic" in one and "(1000 + 3097 = 4097) must be at most 4096" in one for one in found)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"max_response_length": 4096}}, "(2048 + 4096 = 6144) must be at most 4096"),
        ({"rollout": {"vllm": {"tensor_parallel_size": 3}}}, "(3) must divide the 4 attention heads"),
        ({"actor": {"ulysses_sequence_parallel_size": 3}}, None),
        ({"model": {"path": "/no/such"}}, "`model.path` (/no/such) does not exist"),
        ({"model": {"path": f"{TINY}/config.json"}}, f"`model.path` ({TINY}/config.json) is a file; give the"),
    ],
    ids=["beyond_the_positions", "heads", "without_ranks", "no_model", "file"],
)
def test_an_evaluation_is_told_what_its_engines_would_refuse(sections: dict[str, Any], message: str | None) -> None:
    whole = {"model": {"path": TINY}, "data": {"max_response_length": 2048}} | sections
    found = list(served(config(**whole)))
    assert len(found) == (message is not None) and all(message in one for one in found), found


def test_what_also_sees_images_is_held_to_the_limits_of_its_text(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 1024, "num_attention_heads": 6, "num_key_value_heads": 2}
    path = directory(tmp_path, {"model_type": "mistral3", "text_config": text})
    rollout = {"vllm": {"tensor_parallel_size": 4, "load_format": "hf"}}
    heads, window = served(config(model={"path": path}, rollout=rollout))
    assert "`rollout.vllm.tensor_parallel_size` (4) must divide the 6 attention heads of `model.path`" in heads
    assert "must be at most 1024, the positions that `model.path`" in window


def test_the_names_of_a_model_in_several_files_are_read(tmp_path: Path) -> None:
    made = {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    for number, (name, tensor) in enumerate(made.items()):
        save_file({f"model.{name}.weight": tensor}, tmp_path / f"model-{number}.safetensors")
    index = {f"model.{name}.weight": f"model-{number}.safetensors" for number, name in enumerate(made)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert {name: one.shape for name, one in tensors(tmp_path).items()} == {
        "model.a.weight": [2, 3],
        "model.b.weight": [2],
    } and weights_problems(tmp_path) == []
    (tmp_path / "model-1.safetensors").unlink()
    assert tensors(tmp_path) == {} and "model-1.safetensors is missing" in weights_problems(tmp_path)[0]
    (tmp_path / "model-1.safetensors").write_bytes((tmp_path / "model-0.safetensors").read_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"0")
    assert weights_problems(tmp_path) == [], "it is no part of the model"


def scorer(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (SCORER | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        pytest.param(SCORER, {}, None, id="plain"),
        pytest.param(scorer(id2label=..., num_labels=1), {}, None, id="num_labels"),
        pytest.param(scorer(max_position_embeddings=...), {}, None, id="no-window"),
        pytest.param(scorer(max_position_embeddings=4096), {"max_length": 4096}, None, id="short-window-accepted"),
        pytest.param(None, {}, "holds no readable config.json", id="no-config"),
        pytest.param("[]", {}, "holds no readable config.json", id="config-is-a-list"),
        pytest.param(scorer(architectures=["Qwen2ForCausalLM"]), {}, "which has no trained head", id="causal-model"),
        pytest.param(scorer(architectures=...), {}, "its architecture is none", id="no-architecture"),
        pytest.param(scorer(id2label=...), {}, "must have one label, the reward, and has 2", id="labels-by-default"),
        pytest.param(scorer(id2label={"0": "a", "1": "b", "2": "c"}), {}, "and has 3", id="three-labels"),
        pytest.param(scorer(max_position_embeddings=4096), {}, "(4096) must hold", id="short-window"),
        pytest.param(SCORER, {"max_length": 32769, "max_tokens": 65536}, "(32769) must be at most 32768", id="length"),
        pytest.param(SCORER, {"max_length": 9, "max_tokens": 8}, "`reward.model.max_tokens` (8), which", id="tokens"),
        pytest.param(SCORER, {"max_tokens": 22527}, "`reward.model.max_tokens` (22527) must hold", id="small-pass"),
    ],
)
def test_a_reward_model_is_looked_into(
    content: Any, settings: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    cfg = config()
    for key, value in ({"path": directory(tmp_path, content)} | settings).items():
        setattr(cfg.reward.model, key, value)
    found = [*fields.problems(cfg), *reward_model(cfg)]
    assert len(found) == (message is not None) and all(message in problem for problem in found), found
