"""What only trying can tell: every problem is named with key, value and remedy before any worker starts."""

import json
import re
import shutil
from collections.abc import Callable
from importlib import metadata
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


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param(
            ["actor.optim.lr_scheduler=cosine", "actor.optim.lr_scheduler_kwargs.num_cycels=1"],
            ["`actor.optim.lr_scheduler_kwargs` ({'num_cycels': 1})", "(cosine)", "'num_cycels'"],
            id="argument of the schedule",
        ),
        pytest.param(
            ["actor.optim.lr_scheduler=cosine_with_min_lr"],
            ["`actor.optim.lr_scheduler_kwargs` ({})", "(cosine_with_min_lr)", "min_lr"],
            id="argument of the schedule missing",
        ),
        pytest.param(
            ["model.attn_implementation=flsh"],
            ["`model.attn_implementation` (flsh)", "auto", "sdpa"],
            id="attention misspelt",
        ),
        pytest.param(
            ["actor.optim.lr_scheduler=polynomial", "actor.optim.lr_scheduler_kwargs.power='2'"],
            ["`actor.optim.lr_scheduler_kwargs` ({'power': '2'})", "(polynomial)", "cannot be computed", "numbers"],
            id="argument of the schedule that is used after the warm-up",
        ),
        pytest.param(
            ["reward.functions=[{path: dapo.rewards.math, name: compute_scores}]"],
            ["reward.functions[0].name", "compute_score"],
            id="reward function misspelt",
        ),
        pytest.param(
            ["reward.functions=[{path: math, kwargs: {depth: 3}}]"],
            ["reward.functions[0]", "cannot be called", "depth"],
            id="reward kwargs that the function does not know",
        ),
        pytest.param(
            ["reward.functions=[{path: format, kwargs: {think: a, answer: a}}]"],
            ["reward.functions[0].kwargs", "think"],
            id="reward kwargs that do not go together",
        ),
        pytest.param(
            ["reward.functions=[{path: math}, {path: format, weight: -1.0}]"],
            ["reward.functions[1].wrong", "pay"],
            id="a limit that pays",
        ),
        pytest.param(
            ["reward.functions=[{path: math}, {path: overlong, kwargs: {max_response_length: 9, buffer_length: 3}}]"],
            ["overlong", "reward.overlong_buffer.enable"],
            id="overlong twice",
        ),
        pytest.param(
            ["reward.functions=[{path: judge}]", "reward.judge.pattern='Score: [0-9'"],
            ["reward.judge.url", "http://HOST", "reward.judge.model", "reward.judge.pattern", "no regular expression"],
            id="a judge without an address",
        ),
        pytest.param(
            [
                "reward.functions=[{path: judge, kwargs: {url: 'http://127.0.0.1:1/v1', model: m, prompt: '?'}}]",
                *(
                    "reward.judge.pattern='[0-9]'",
                    "reward.judge.lowest=1",
                    "reward.judge.key_variable=NO_SUCH_VARIABLE",
                ),
            ],
            ["{response}", "a group", "reward.judge.lowest", "NO_SUCH_VARIABLE, which is not set"],
            id="a judge that cannot be read",
        ),
        pytest.param(
            ["reward.functions=[{path: code}]", "reward.limits.sandbox.packages=[nmpy]"],
            ["`reward.limits.sandbox.packages` names 'nmpy'", "no package that is installed"],
            id="a package of the sandbox misspelt",
        ),
        pytest.param(
            [
                "rollout.function.path=tool_use",
                "rollout.function.kwargs.python=true",
                "reward.limits.sandbox.packages=[nmpy]",
            ],
            ["`reward.limits.sandbox.packages` names 'nmpy'"],
            id="a package for the policy's programs misspelt",
        ),
        pytest.param(
            ["rollout.function.path=tool_use", "rollout.function.kwargs.max_calls=many"],
            ["`rollout.function.kwargs.max_calls` (many) must be a whole number"],
            id="a ready rollout function's argument",
        ),
        pytest.param(
            ["rollout.function.path=tool_use", "rollout.function.kwargs.python=1"],
            ["`rollout.function.kwargs.python` (1) must be true or false"],
            id="a ready rollout function's switch",
        ),
        pytest.param(
            ["reward.functions=[{path: /no/such.py, name: f}]"],
            ["reward.functions[0].path", "/no/such.py"],
            id="no file",
        ),
    ],
)
def test_bad_values_are_named(overrides, parts):
    with pytest.raises(ValueError) as error:
        preflight(compose(overrides, experiment="dapo_tiny"))
    for part in parts:
        assert part in str(error.value)


def test_a_key_that_no_header_may_hold_is_named_and_not_shown(monkeypatch):
    judge = "reward.functions=[{path: judge, kwargs: {url: 'http://127.0.0.1:1/v1', model: m}}]"
    cfg = compose([judge, "reward.judge.key_variable=JUDGE_API_KEY"], experiment="dapo_tiny")
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t\n")  # as a file holds it
    preflight(cfg)
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t\nand another")
    with pytest.raises(ValueError, match="names JUDGE_API_KEY, which holds a character that no header may") as error:
        preflight(cfg)
    assert "s3cr3t" not in str(error.value)


def test_calls_further_apart_than_a_worker_may_be_silent_are_named(tmp_path: Path) -> None:
    """All async functions of a worker share its calls; those that ask nobody make none."""
    (tmp_path / "mine.py").write_text("async def compute_score(data_source, solution_str, ground_truth, extra_info): 0")
    asks = f"{{path: {tmp_path / 'mine.py'}}}"
    judge = "{path: judge, kwargs: {url: 'http://127.0.0.1:1/v1', model: m}}"
    rate = ["reward.remote.calls_per_minute=1200", "reward.num_workers=2", "reward.timeout_s=80"]
    preflight(compose([*rate, f"reward.functions=[{judge}, {{path: math}}]"], experiment="dapo_tiny"))
    preflight(compose(["reward.remote.calls_per_minute=1"], experiment="dapo_tiny"))
    with pytest.raises(ValueError) as error:
        preflight(compose([*rate, f"reward.functions=[{judge}, {asks}]"], experiment="dapo_tiny"))
    for part in (
        "`reward.timeout_s` (80)",
        "(45)",
        "the 44.8 s in which a worker makes its 448 calls",
        "functions, 2)",
    ):
        assert part in str(error.value)


def test_all_problems_come_at_once():
    overrides = ["reward.functions=[{path: /no/such.py}, {path: maths}]", "actor.optim.lr_scheduler=cosine_with_min_lr"]
    with pytest.raises(ValueError) as error:
        preflight(compose(overrides, experiment="dapo_tiny"))
    assert len(str(error.value).splitlines()) == 3


def test_torchvision_built_for_cuda_next_to_a_cpu_torch(monkeypatch):
    """It is named instead of the import of transformers that it breaks."""
    cfg = compose(["actor.optim.lr_scheduler=cosine_with_min_lr"], experiment="dapo_tiny")
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    with pytest.raises(ValueError, match=r"^torchvision 0\.28\.0 .*pip uninstall torchvision`$"):
        preflight(cfg)
    versions["torchvision"] = "0.28.0+cpu"
    with pytest.raises(ValueError, match="lr_scheduler_kwargs"):
        preflight(cfg)


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
