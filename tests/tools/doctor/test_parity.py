"""A real engine against a real actor rank, layer by layer: equal models, one that differs in a known place, and heads
that keep float32."""

import asyncio
import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo.tiny.random_model import make_random_model
from dapo.tools.doctor.parity import LEAP, Made, differences, recompute, sample, told
from dapo.types import TrainSequence
from tests.support.engines.two import make_config

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(900)]

PROMPT = np.array([20, 21, 22, 23, 24, 25], dtype=np.int32)
LAYERS = 4
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "sum")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("parity") / "model", layers=LAYERS)


@pytest.fixture(scope="module")
def sampled(ray_cluster: None, model_dir: Path) -> tuple[Made, list[TrainSequence], list[TrainSequence]]:
    return asyncio.run(sample(make_config(str(model_dir), 1), PROMPT))


def test_one_model_on_both_sides_differs_by_rounding(sampled, model_dir: Path) -> None:
    engine, together, alone = sampled
    actors = asyncio.run(recompute(make_config(str(model_dir), 1), together, alone))
    found = differences(engine, actors)
    layers = [f"layer {number} ({part})" for number in range(LAYERS) for part in PARTS]
    assert list(found) == ["embed_tokens", *layers, "norm", "the head"]
    assert max(found.values()) < 1e-5
    text, mean = told(engine, actors)
    assert mean < 1e-5
    assert re.search(r"equal bits in 64 of 64 tokens$|of the largest value$|is computed alone$", text), text


def test_the_place_that_differs_is_named(sampled, model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"] *= 1.1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    engine, together, alone = sampled
    actors = asyncio.run(recompute(make_config(str(other), 1), together, alone))
    text, mean = told(engine, actors)
    assert re.search(r"; from \S+ to \S+ in layer 2 \(mlp\)$", text), text
    found = differences(engine, actors)
    assert found["layer 2 (mlp)"] == pytest.approx(0.1 / 1.1, rel=1e-3)
    assert all(found[f"layer {number} ({part})"] < 1e-5 for number in range(2) for part in PARTS)
    assert mean > 1e-5


def plain_logprobs(made: Made, sequences: list[TrainSequence], weight: torch.Tensor, temperature: float) -> np.ndarray:
    """Of the rows that each side's final norm has returned, in float64."""
    found = []
    for rows, sequence in zip(made.rows, sequences, strict=True):
        logits = torch.tensor(rows["model.norm"], dtype=torch.float64) @ weight.double().T / temperature
        labels = torch.from_numpy(sequence.token_ids[sequence.num_prompt_tokens :]).long()
        found.append(logits.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    return torch.cat(found).numpy()


@pytest.mark.parametrize("head_dtype", ["auto", "float32"])
def test_a_head_in_float32_keeps_its_sums_on_both_sides(head_dtype: str, tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "model", layers=2, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 50  # logits of about 6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weight = tensors["lm_head.weight"].to(torch.bfloat16)
    cfg = make_config(str(folder), 1)
    cfg.model.dtype, cfg.model.head_dtype, cfg.trainer.device = "bfloat16", head_dtype, "cpu"
    cfg.rollout.temperature = 0.7
    engine, together, alone = asyncio.run(sample(cfg, PROMPT))
    actors = asyncio.run(recompute(cfg, together, alone))
    for made in (engine, actors):
        gaps = np.abs(plain_logprobs(made, alone, weight, 0.7) - np.concatenate(made.alone))
        if head_dtype == "float32":
            assert gaps.max() < 1e-5
        else:
            assert gaps.mean() > 1e-3


def made(logprobs: list[float], **rows: float) -> Made:
    values = [np.array(logprobs, dtype=np.float32)]
    return Made(
        together=values,
        alone=values,
        rows=[{f"model.{name}": np.full((2, 3), value, dtype=np.float32) for name, value in rows.items()}],
    )


def test_what_is_said() -> None:
    one = made([-1.0, -2.0], embed_tokens=1.0, norm=2.0)
    assert told(one, one) == ("engine and actors: equal bits in 2 of 2 tokens", 0.0)
    together = dataclasses.replace(one, together=[np.array([-1.0, -2.5], dtype=np.float32)])
    text, mean = told(one, together)
    assert mean == 0.25
    assert text == (
        "engine and actors: log-probabilities differ in 1 of 2 tokens, mean 2.5e-01, largest 5.0e-01; equal bits when "
        "each response is computed alone"
    )
    text, _ = told(one, made([-1.0, -2.0], embed_tokens=1.0, norm=2.5))
    assert text == (
        "engine and actors: equal log-probabilities in 2 of 2 tokens; outputs differ from norm on, there by 2.0e-01 of "
        "the largest value"
    )
    text, _ = told(one, made([-1.0, -2.5], other=1.0))
    assert text.endswith("; none of their layers have the same names"), text
    text, _ = told(one, made([-1.0, -2.0 * (1 - 2 * LEAP * 2**-20)], embed_tokens=1.0 + 2**-20, norm=2.0))
    assert "differ from embed_tokens on" in text and text.endswith("in the head"), text
