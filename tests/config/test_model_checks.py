"""Bad values of `model`, `actor` and `weight_sync`: each is named with key, value and remedy before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dapo.config import fields
from dapo.config.actor import LoraConfig
from dapo.config.facts.model_files import shapes, weights_problems
from dapo.config.rules.model import actor, served
from dapo.config.schema import Config

TINY = "pkg://dapo.tiny/base"  # 4,096 positions
LONGEST = {"max_prompt_length": 2048, "max_response_length": 2048}  # for it


def config(**sections: dict[str, Any]) -> Config:
    cfg = Config()
    cfg.model.path = "Qwen/Qwen2.5-7B"  # 28 heads, 4 key-value heads; its shape is in the repository
    cfg.actor.num_workers = 8
    for section, values in sections.items():
        for key, value in values.items():
            setattr(getattr(cfg, section), key, value)
    return cfg


def problems(cfg: Config) -> list[str]:
    return [*fields.problems(cfg), *actor(cfg)]


def test_nothing_to_say_of_the_defaults() -> None:
    assert problems(config()) == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        pytest.param(
            {"model": {"gradient_checkpointing": "some"}},
            "`model.gradient_checkpointing` (some) must be one of full, selective, none",
            id="checkpointing",
        ),
        pytest.param(
            {"model": {"dtype": "float8"}},
            "`model.dtype` (float8) must be one of float32, bfloat16, float16",
            id="dtype",
        ),
        pytest.param(
            {"weight_sync": {"transport": "pigeon"}},
            "`weight_sync.transport` (pigeon) must be one of auto, broadcast, ipc",
            id="transport",
        ),
        pytest.param(
            {"actor": {"ulysses_sequence_parallel_size": 28}},
            "`actor.ulysses_sequence_parallel_size` (28) must divide `actor.num_workers` (8): 1, 2, 4, 8",
            id="shares_and_ranks",
        ),
        pytest.param(
            {"actor": {"fsdp_size": 16}}, "`actor.fsdp_size` (16) must divide `actor.num_workers`", id="copies"
        ),
        pytest.param(
            {"actor": {"ulysses_sequence_parallel_size": 8}},
            "`actor.ulysses_sequence_parallel_size` (8) must divide the 28 attention heads of `model.path` "
            "(Qwen/Qwen2.5-7B), and divide its 4 key-value heads or be a multiple of them; it can be 1, 2, 4, 28",
            id="heads",
        ),
        pytest.param(
            {"rollout": {"vllm": {"tensor_parallel_size": 8}}},
            "`rollout.vllm.tensor_parallel_size` (8) must divide the 28 attention heads of `model.path` "
            "(Qwen/Qwen2.5-7B), and divide its 4 key-value heads or be a multiple of them; it can be 1, 2, 4, 28",
            id="heads_of_an_engine",
        ),
        pytest.param(
            {"actor": {"ulysses_sequence_parallel_size": 2, "max_tokens_per_gpu": 11_263}},
            "`actor.max_tokens_per_gpu` (11263) x `actor.ulysses_sequence_parallel_size` (2) must hold one sequence of "
            "`data.max_prompt_length` + `data.max_response_length` (2048 + 20480 = 22528)",
            id="a_sequence_too_long",
        ),
        pytest.param(
            {"actor": {"ulysses_sequence_parallel_size": 2}, "model": {"attn_implementation": "sdpa"}},
            "`model.attn_implementation` (sdpa) needs a mask of the whole sequence",
            id="a_masked_attention",
        ),
        pytest.param(
            {"model": {"path": TINY}, "data": {"max_response_length": 2049}},
            "`data.max_prompt_length` + `data.max_response_length` (2048 + 2049 = 4097) must be at most 4096, the "
            f"positions that `model.path` ({TINY}) has by its config.json",
            id="beyond_the_positions",
        ),
        pytest.param(
            {
                "model": {"path": TINY},
                "data": {"max_response_length": 2048},
                "rollout": {"vllm": {"max_model_len": 5000}},
            },
            "`rollout.vllm.max_model_len` (5000) must be at most 4096",
            id="an_engine_beyond_the_positions",
        ),
        pytest.param(
            {"model": {"lora": LoraConfig(rank=-1)}},
            "`model.lora.rank` (-1) must be 0 or more; 0 is off, 8 to 64",
            id="lora_rank",
        ),
        pytest.param(
            {"model": {"lora": LoraConfig(rank=8, alpha=0)}},
            "`model.lora.alpha` (0) must be greater than 0; 2 x `model.lora.rank` is usual",
            id="lora_alpha",
        ),
        pytest.param(
            {"model": {"lora": LoraConfig(rank=8, target_modules=[])}},
            "`model.lora.target_modules` is empty",
            id="lora_none",
        ),
        pytest.param(
            {"model": {"path": TINY, "lora": LoraConfig(rank=8, target_modules=["q_prj", "v_proj"])}, "data": LONGEST},
            f"`model.lora.target_modules` (q_prj) must name linear layers of `model.path` ({TINY}) other than its head "
            "and embedding: down_proj, gate_proj, up_proj, k_proj, o_proj, q_proj, v_proj, or all-linear; did you mean "
            "`q_proj`?",
            id="lora_misspelt",
        ),
        pytest.param(
            {"model": {"path": TINY, "lora": LoraConfig(rank=8, target_modules=["lm_head"])}, "data": LONGEST},
            "`model.lora.target_modules` (lm_head) must name linear layers",
            id="lora_head",
        ),
        pytest.param(
            {"model": {"path": TINY, "lora": LoraConfig(rank=8, target_modules=["norm"])}, "data": LONGEST},
            "`model.lora.target_modules` (norm) must name linear layers",
            id="lora_vector",
        ),
    ],
)
def test_one_problem_one_line(sections: dict[str, Any], message: str) -> None:
    found = problems(config(**sections))
    assert len(found) == 1 and found[0].startswith(message), found


def test_two_ranks_hold_a_sequence_that_one_cannot() -> None:
    half = {"ulysses_sequence_parallel_size": 2, "max_tokens_per_gpu": 11_264}
    assert list(actor(config(actor=half))) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "holds no config.json", id="no_config"),
        pytest.param("{", "config.json cannot be read", id="not_json"),
        pytest.param(json.dumps({"num_attention_heads": 6}), "must divide the 6 attention heads", id="heads"),
    ],
)
def test_a_directory_is_looked_into(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    cfg = config(model={"path": str(tmp_path)}, actor={"ulysses_sequence_parallel_size": 4})
    [problem] = actor(cfg)
    assert message in problem


WINDOW = {"sliding_window": 4096}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param({"logits_scaling": 8.0}, "changes its logits after the head (logits_scaling: 8.0", id="scaled"),
        pytest.param({"logit_scale": 1.0, "final_logit_softcapping": None}, None, id="scaled_by_one"),
        pytest.param(
            {"attn_logit_softcapping": 50.0}, "caps attention scores (attn_logit_softcapping: 50.0", id="capped"
        ),
        pytest.param(WINDOW, "see 4096 tokens (sliding_window in config.json), fewer than", id="window"),
        pytest.param(
            WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}, "see 4096 tokens", id="one_layer"
        ),
        pytest.param(WINDOW | {"layer_types": ["full_attention"]}, None, id="no_layer"),
        pytest.param(WINDOW | {"use_sliding_window": False}, None, id="window_off"),
        pytest.param(WINDOW | {"max_window_layers": 28, "num_hidden_layers": 28}, None, id="above_all_layers"),
        pytest.param({"sliding_window": 22_528}, None, id="wide_enough"),
        pytest.param({"sliding_window": None}, None, id="no_window"),
    ],
)
def test_what_the_actors_do_not_compute_is_refused(
    tmp_path: Path, content: dict[str, Any], message: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    problems = list(actor(config(model={"path": str(tmp_path)})))
    assert len(problems) == (message is not None) and all(message in problem for problem in problems), problems


def dynamic(**rope: Any) -> dict[str, Any]:
    """What a model with 4,096 positions says of itself, which changes its frequencies by the length of a sequence."""
    return {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 8.0}} | rope


@pytest.mark.parametrize(
    ("content", "longest", "refused"),
    [
        pytest.param(dynamic(), 4097, True, id="beyond"),
        pytest.param(dynamic(), 4096, False, id="within"),
        pytest.param(dynamic(rope_parameters={"rope_type": "dynamic", "factor": 8.0}), 4097, True, id="another_key"),
        pytest.param(
            dynamic(rope_parameters={"full_attention": {"rope_type": "dynamic", "factor": 8.0}}),
            4097,
            True,
            id="by_kinds_of_layers",
        ),
        pytest.param(dynamic(rope_scaling={"type": "linear", "factor": 8.0}), 4097, False, id="linear"),
        pytest.param({"text_config": dynamic()}, 4097, True, id="of_text"),
    ],
)
@pytest.mark.parametrize("reads", [actor, served])
def test_frequencies_that_change_with_the_length_are_refused_where_they_do(
    tmp_path: Path, content: dict[str, Any], longest: int, refused: bool, reads: Any
) -> None:
    """transformers makes them anew for each length, and vLLM once, for the positions that the model was trained on."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    data = {"max_prompt_length": 1000, "max_response_length": longest - 1000}
    found = list(reads(config(model={"path": str(tmp_path)}, data=data)))
    assert len(found) == refused
    if refused:
        assert "dynamic" in found[0] and f"(1000 + 3097 = {longest}) must be at most 4096" in found[0]


def test_another_attention_may_compute_a_window(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WINDOW | {"attn_logit_softcapping": 50.0}))
    assert list(actor(config(model={"path": str(tmp_path), "attn_implementation": "flash_attention_2"}))) == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        pytest.param(
            {"data": LONGEST | {"max_response_length": 4096}},
            "`data.max_prompt_length` + `data.max_response_length` (2048 + 4096 = 6144) must be at most 4096",
            id="beyond_the_positions",
        ),
        pytest.param(
            {"data": LONGEST, "rollout": {"vllm": {"tensor_parallel_size": 3}}},
            "`rollout.vllm.tensor_parallel_size` (3) must divide the 4 attention heads",
            id="heads",
        ),
        pytest.param({"data": LONGEST, "actor": {"ulysses_sequence_parallel_size": 3}}, None, id="without_ranks"),
        pytest.param({"model": {"path": "/no/such"}}, "`model.path` (/no/such) does not exist", id="no_model"),
        pytest.param(
            {"model": {"path": f"{TINY}/config.json"}},
            f"`model.path` ({TINY}/config.json) is a file; give the",
            id="file",
        ),
    ],
)
def test_an_evaluation_is_told_what_its_engines_would_refuse(sections: dict[str, Any], message: str | None) -> None:
    found = list(served(config(**({"model": {"path": TINY}} | sections))))
    assert len(found) == (message is not None) and all(one.startswith(message) for one in found), found


def test_what_also_sees_images_is_held_to_the_limits_of_its_text(tmp_path: Path) -> None:
    """Engines of an evaluation, or of a judge, would refuse it after all have started."""
    text = {"max_position_embeddings": 1024, "num_attention_heads": 6, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    rollout = {"vllm": {"tensor_parallel_size": 4, "load_format": "hf"}}
    heads, window = served(config(model={"path": str(tmp_path)}, rollout=rollout))
    assert "`rollout.vllm.tensor_parallel_size` (4) must divide the 6 attention heads of `model.path`" in heads
    assert "must be at most 1024, the positions that `model.path`" in window


def test_an_evaluation_needs_safetensors_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    [line] = served(config(model={"path": str(tmp_path)}))
    assert "holds pytorch_model.bin and no model.safetensors" in line


@pytest.mark.parametrize("only", ["train", "both"])
def test_a_run_without_engines_may_have_any_number_of_their_gpus(only: str) -> None:
    given = {"trainer": {"only": only}, "rollout": {"vllm": {"tensor_parallel_size": 8}}}
    assert len(list(actor(config(**given)))) == (only == "both")


@pytest.mark.parametrize("targets", [["all-linear"], ["x", "all-linear"], ["q_proj", "mlp.up_proj"], ["99.k_proj"]])
def test_targets_that_the_ranks_may_find_are_left_to_them(targets: list[str]) -> None:
    lora = LoraConfig(rank=8, target_modules=targets)
    assert list(actor(config(model={"path": TINY, "lora": lora}, data=LONGEST))) == []


def test_the_names_of_a_model_in_several_files_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({f"model.{name}.weight": tensor}, tmp_path / f"model-{number}.safetensors")
    index = {f"model.{name}.weight": f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert shapes(tmp_path) == {"model.a.weight": [2, 3], "model.b.weight": [2]} and weights_problems(tmp_path) == []
    (tmp_path / "model-1.safetensors").unlink()
    assert shapes(tmp_path) == {} and "model-1.safetensors is missing" in weights_problems(tmp_path)[0]
    (tmp_path / "model-1.safetensors").write_bytes((tmp_path / "model-0.safetensors").read_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"0")
    assert weights_problems(tmp_path) == [], "it is no part of the model"
