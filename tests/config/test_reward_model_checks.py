"""What is said of a bad `reward.model` before any worker starts."""

import json
import re
from typing import Any

import pytest

from dapo.config import fields
from dapo.config.rules.reward_model import reward_model
from dapo.config.schema import Config

GOOD = {
    "architectures": ["Qwen2ForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "max_position_embeddings": 32768,
}


def problems(tmp_path, said: Any = GOOD, **settings) -> list[str]:
    """said: what config.json holds; settings: of `reward.model`."""
    folder = tmp_path / "scorer"
    folder.mkdir()
    if said is not None:
        (folder / "config.json").write_text(said if isinstance(said, str) else json.dumps(said))
    cfg = Config()
    for key, value in ({"path": str(folder)} | settings).items():
        setattr(cfg.reward.model, key, value)
    return [*fields.problems(cfg), *reward_model(cfg)]


def changed(**values):
    return {key: value for key, value in (GOOD | values).items() if value is not ...}


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        pytest.param(GOOD, {}, id="plain"),
        pytest.param(changed(id2label=..., num_labels=1), {}, id="num_labels"),
        pytest.param(changed(max_position_embeddings=...), {}, id="no-window"),
        pytest.param(changed(max_position_embeddings=4096), {"max_length": 4096}, id="short-window-accepted"),
        pytest.param(None, {"path": "owner/reward-model"}, id="hub-name-is-checked-at-load"),
        pytest.param(None, {"path": "", "max_length": 9, "max_tokens": 8}, id="no-reward-model"),
    ],
)
def test_nothing_is_said_of(said, settings, tmp_path):
    assert problems(tmp_path, said, **settings) == []


@pytest.mark.parametrize(
    ("said", "settings", "message"),
    [
        pytest.param(None, {}, "holds no readable config.json", id="no-config"),
        pytest.param("{not json", {}, "holds no readable config.json", id="broken-config"),
        pytest.param("[]", {}, "holds no readable config.json", id="config-is-a-list"),
        pytest.param(
            changed(architectures=["Qwen2ForCausalLM"]),
            {},
            "its architecture is Qwen2ForCausalLM, which has no trained head",
            id="causal-model",
        ),
        pytest.param(changed(architectures=...), {}, "its architecture is none", id="no-architecture"),
        pytest.param(changed(id2label=...), {}, "must have one label, the reward, and has 2", id="labels-by-default"),
        pytest.param(changed(id2label={"0": "a", "1": "b", "2": "c"}), {}, "and has 3", id="three-labels"),
        pytest.param(
            changed(max_position_embeddings=4096),
            {},
            r"`max_position_embeddings` of `reward.model.path` .* \(4096\) must hold .* \(2048 \+ 20480 = 22528\)",
            id="short-window",
        ),
        pytest.param(GOOD, {"max_length": 32769, "max_tokens": 65536}, r"\(32769\) must be at most 32768", id="length"),
        pytest.param(GOOD, {"max_length": 9, "max_tokens": 8}, "`reward.model.max_tokens` .8., which", id="tokens"),
        pytest.param(GOOD, {"max_tokens": 22527}, r"`reward.model.max_tokens` \(22527\) must hold", id="small-pass"),
        pytest.param(GOOD, {"max_tokens": 0}, r"`reward.model.max_tokens` \(0\) must be at least 1", id="no-pass"),
        pytest.param(GOOD, {"num_workers": 0}, r"`reward.model.num_workers` \(0\) must be at least 1", id="workers"),
        pytest.param(GOOD, {"num_gpus": 2.0}, r"`reward.model.num_gpus` \(2.0\) must be above 0 and at", id="gpus"),
        pytest.param(
            GOOD, {"timeout_s": 0.0}, r"`reward.model.timeout_s` \(0.0\) must be greater than 0", id="timeout"
        ),
        pytest.param(GOOD, {"weight": float("nan")}, r"`reward.model.weight` \(nan\) must be a finite", id="weight"),
        pytest.param(
            GOOD, {"dtype": "int8"}, r"`reward.model.dtype` \(int8\) must be one of auto, float32", id="dtype"
        ),
        pytest.param(GOOD, {"device": "tpu"}, r"`reward.model.device` \(tpu\) must be one of auto, cpu", id="device"),
    ],
)
def test_what_is_wrong_is_named_with_key_value_and_remedy(said, settings, message, tmp_path):
    [problem] = problems(tmp_path, said, **settings)
    assert re.search(message, problem)


def test_a_path_that_does_not_exist_names_the_nearest(tmp_path):
    [problem] = problems(tmp_path, path=str(tmp_path / "scorre"))
    assert problem.startswith("`reward.model.path`") and f"did you mean {tmp_path / 'scorer'}?" in problem
