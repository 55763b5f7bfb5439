"""Models that cannot be loaded, trained or packed as the run would: each is told before any worker starts."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from huggingface_hub import constants

from dapo.config.compose import compose
from dapo.config.facts.model_class import why_not_packed
from dapo.config.facts.model_files import INDEX
from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from dapo.doctor.checked.files import models
from dapo.doctor.question import question
from dapo.driver.preflight import preflight


def lines(cfg: Config) -> list[str]:
    try:
        preflight(cfg)
    except ValueError as error:
        return str(error).splitlines()
    return []


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def of_kind(kind: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config = {key: value for key, value in config.items() if key != "layer_types"} | {"model_type": kind}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def with_code_of_its_own(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config | own))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny model, to be broken."""
    return Path(shutil.copytree(resolve_path("pkg://dapo.tiny/base"), tmp_path / "model"))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(truncated, "model.safetensors has 100000 bytes, and its header says 3688056", id="cut off"),
        pytest.param(without_weights, "holds no weights (", id="no weights"),
        pytest.param(of_kind("qwen9"), "transformers cannot read its config.json: The checkpoint", id="unknown kind"),
        pytest.param(with_code_of_its_own, "set `model.trust_remote_code=true` if you trust", id="code of its own"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told(
    model: Path, broken: Callable[[Path], None], message: str, trains: bool
) -> None:
    broken(model)
    with pytest.raises(ValueError, match=rf"^`model.path` \({model}\)") as error:
        preflight(compose([f"model.path={model}"], experiment="dapo_tiny"), trains=trains)
    [line] = str(error.value).splitlines()
    assert message in line


def without_a_shard(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"lm_head.weight": "model-2-of-2.safetensors"}}')
    (folder / "model-2-of-2.safetensors").symlink_to("../../blobs/not-there-yet")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(without_a_shard, "model-2-of-2.safetensors is missing, which model.saf", id="a shard"),
        pytest.param(without_weights, "holds no weights (", id="no weights"),
    ],
)
def test_without_a_network_the_hubs_cache_must_be_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[Path], None], message: str
) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    shutil.copytree(resolve_path("pkg://dapo.tiny/base"), snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cfg = compose(["model.path=owner/name"], experiment="dapo_tiny")
    asked = question(cfg, joined=False, driver=True, gpus=False)
    assert models(asked).level == "ok"
    preflight(cfg)
    broken(snapshot)
    with pytest.raises(
        ValueError, match=rf"`model.path` \(owner/name\).*{re.escape(message)}.*`hf download owner/name`"
    ):
        preflight(cfg)
    assert (models(asked).level == "fault") == (broken is without_a_shard), "a model of .bin files may be wanted"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    preflight(cfg)  # what lacks is downloaded


def test_a_model_of_another_task_is_refused_where_there_are_ranks(model: Path) -> None:
    of_kind("vit")(model)
    cfg = compose([f"model.path={model}"], experiment="dapo_tiny")
    preflight(cfg, trains=False)
    with pytest.raises(ValueError, match="is of the kind vit, of which transformers has no causal language model"):
        preflight(cfg)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "flash_attention_2"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("gptj", "GPTJForCausalLM computes attention by itself"),
        ("falcon", "FalconForCausalLM computes attention by itself"),
        ("falcon_h1", "FalconH1ForCausalLM keeps a state from token to token"),
        ("gemma3", "Gemma3ForConditionalGeneration is not of text alone"),
        ("qwen2", ""),
    ],
)
def test_a_model_whose_attention_does_not_hear_of_sequences_is_refused_where_there_are_ranks(
    model: Path, kind: str, says: str, attention: str
) -> None:
    """Those end to end would attend to each other, or those of sequence-parallel ranks to their own part alone."""
    of_kind(kind)(model)
    cfg = compose([f"model.path={model}"], experiment="dapo_tiny")
    cfg.model.attn_implementation = attention
    preflight(cfg, trains=False)
    problems = lines(cfg)
    assert [f"`model.path` ({model}): {says}" in line for line in problems].count(True) == bool(says), problems
    assert len(problems) == bool(says) + (attention == "flash_attention_2")  # which is not installed here


@pytest.mark.parametrize(("attention", "refused"), [("auto", False), ("sdpa", True)])
def test_a_model_whose_mask_does_not_hear_of_sequences_is_refused_where_a_mask_keeps_them_apart(
    model: Path, attention: str, refused: bool
) -> None:
    of_kind("opt")(model)
    cfg = compose([f"model.path={model}"], experiment="dapo_tiny")
    cfg.model.attn_implementation = attention
    problems = lines(cfg)
    assert len(problems) == refused, problems
    if refused:
        assert f"`model.path` ({model}): OPTForCausalLM makes its mask without the positions of tokens" in problems[0]
        assert "set `model.attn_implementation=auto`" in problems[0]


OWN = """
from transformers import PreTrainedModel, Qwen2Config


class OwnForCausalLM(PreTrainedModel):
    config_class = Qwen2Config

    def forward(self, input_ids, position_ids=None, attention_mask=None, use_cache=None):
        pass
"""


def test_code_of_a_models_own_is_looked_at_where_it_is_trusted(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "modeling_own.py").write_text(OWN)
    cfg = compose([f"model.path={model}"], experiment="dapo_tiny")
    assert lines(cfg) == []
    cfg.model.trust_remote_code = True
    [line] = lines(cfg)
    assert "OwnForCausalLM computes attention by itself" in line
    (model / "modeling_own.py").write_text("import no_such_package\n")
    assert lines(cfg) == []


def test_a_base_model_that_takes_no_further_arguments_hears_of_no_sequences() -> None:
    class Model:
        _is_stateful, _supports_attention_backend = False, True

    class Takes:
        def forward(self, input_ids, **kwargs): ...

    class TakesNone:
        def forward(self, input_ids, position_ids=None): ...

    said = [why_not_packed(Model, base, masked=False) for base in (Takes, TakesNone, None)]
    assert list(map(bool, said)) == [False, True, False]


def test_an_engine_may_be_told_to_read_other_files(model: Path) -> None:
    without_weights(model)
    (model / "pytorch_model.bin").write_bytes(b"")
    given = [f"model.path={model}", "rollout.vllm.load_format=hf"]
    preflight(compose(given, experiment="dapo_tiny", trains=False), trains=False)
    with pytest.raises(ValueError, match=r"holds pytorch_model.bin and no model.safetensors"):
        compose(given[:1], experiment="dapo_tiny", trains=False)


def test_what_only_the_hub_knew_is_checked_once_it_is_here(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name whose config.json is not in the cache passes the first checks; that of transformers comes later."""
    cfg = compose(["rollout.vllm.tensor_parallel_size=3", "model.path=owner/name"], experiment="dapo_tiny")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda path, **_: given(model))
    given = transformers.Qwen2Config.from_pretrained
    with pytest.raises(
        ValueError, match=r"`rollout.vllm.tensor_parallel_size` \(3\) must divide the 4 attention heads"
    ):
        preflight(cfg)
