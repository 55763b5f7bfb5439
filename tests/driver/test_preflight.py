"""What only trying can tell before any worker starts; tests/config/refused.tsv has the pure configuration."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file, save_file

from dapo.config.compose import _by_hydra, checked_overrides, compose, typed
from dapo.config.facts import hub
from dapo.config.facts.model_files import INDEX
from dapo.config.paths import resolve_path
from dapo.config.reward import JudgeConfig, JudgeEngineConfig, RewardFunctionConfig
from dapo.config.rules.model import why_not_packed
from dapo.config.schema import Config
from dapo.driver import run
from dapo.driver.preflight import early_problems, preflight
from dapo.main_ppo import accepted, launch
from dapo.rewards.calling.loading import OWN, OWN_MODEL, load, with_judge
from dapo.rewards.judge import problems as judge_problems
from dapo.state.run_dir import claim_output_dir

BASE = "pkg://dapo.tiny/base"
JUDGE = "{path: judge, kwargs: {url: 'http://127.0.0.1:1/v1', model: m}}"


def lines(cfg: Config) -> list[str]:
    try:
        preflight(cfg)
    except ValueError as error:
        return str(error).splitlines()
    return []


def test_a_key_that_no_header_may_hold_is_named_and_not_shown(monkeypatch):
    cfg = compose([f"reward.functions=[{JUDGE}]", "reward.judge.key_variable=JUDGE_API_KEY"], experiment="dapo_tiny")
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t\n")  # as a file holds it
    preflight(cfg)
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t\nand another")
    with pytest.raises(ValueError, match="names JUDGE_API_KEY, which holds a character that no header may") as error:
        preflight(cfg)
    assert "s3cr3t" not in str(error.value)


def test_the_function_asks_the_judge_of_the_run() -> None:
    own = JudgeConfig(engine=JudgeEngineConfig(path=BASE))
    [spec] = with_judge([RewardFunctionConfig(path="judge")], own)
    assert (spec.kwargs["url"], spec.kwargs["model"]) == (OWN, OWN_MODEL) and "engine" not in spec.kwargs
    assert list(judge_problems(load(spec).kwargs)) == []
    elsewhere = RewardFunctionConfig(path="judge", kwargs={"url": "http://a/v1", "model": "m"})
    assert with_judge([elsewhere], own)[0].kwargs["url"] == "http://a/v1"


def test_calls_further_apart_than_a_worker_may_be_silent_are_named(tmp_path: Path) -> None:
    """All async functions of a worker share its calls; those that ask nobody make none."""
    (tmp_path / "mine.py").write_text("async def compute_score(data_source, solution_str, ground_truth, extra_info): 0")
    asks = f"{{path: {tmp_path / 'mine.py'}}}"
    rate = ["reward.remote.calls_per_minute=1200", "reward.num_workers=2", "reward.timeout_s=80"]
    preflight(compose([*rate, f"reward.functions=[{JUDGE}, {{path: math}}]"], experiment="dapo_tiny"))
    preflight(compose(["reward.remote.calls_per_minute=1"], experiment="dapo_tiny"))
    [line] = lines(compose([*rate, f"reward.functions=[{JUDGE}, {asks}]"], experiment="dapo_tiny"))
    assert re.search(r"`reward.timeout_s` \(80\).*\(45\)", line) and "functions, 2)" in line
    assert "the 44.8 s in which a worker makes its 448 calls" in line


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def without_a_shard(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"lm_head.weight": "model-2-of-2.safetensors"}}')
    (folder / "model-2-of-2.safetensors").symlink_to("../../blobs/not-there-yet")


def says(**changes: object) -> Callable[[Path], None]:
    """Changes keys of config.json."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config.pop("layer_types", None)
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny model, to be broken."""
    return Path(shutil.copytree(resolve_path(BASE), tmp_path / "model"))


OWN_CODE = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(truncated, "model.safetensors has 100000 bytes, and its header says 3688056", id="cut off"),
        pytest.param(without_weights, "holds no weights (", id="no weights"),
        pytest.param(says(model_type="qwen9"), "transformers cannot read its config.json: The check", id="unknown"),
        pytest.param(says(**OWN_CODE), "set `model.trust_remote_code=true` if you trust", id="code of its own"),
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


def holds(change: Callable[[dict[str, torch.Tensor]], object], **changes: object) -> Callable[[Path], None]:
    """Changes the tensors of the file, and keys of config.json."""

    def broken(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")
        says(**changes)(folder)

    return broken


def copy_head(found: dict[str, torch.Tensor]) -> None:
    found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()


def other_head(found: dict[str, torch.Tensor]) -> None:
    found["lm_head.weight"] = found["model.embed_tokens.weight"] / 2


def half_the_rows(found: dict[str, torch.Tensor]) -> None:
    found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"][:132].clone()


def without_a_layer(found: dict[str, torch.Tensor]) -> None:
    for name in [name for name in found if ".layers.1." in name]:
        del found[name]


def quantised(found: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    found[name] = found[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(holds(copy_head), "", id="a copy of the tied head"),
        pytest.param(holds(copy_head, tie_word_embeddings=False), "", id="a head"),
        pytest.param(
            holds(dict, tie_word_embeddings=False), "no file holds a head beside model.embed_to", id="no head"
        ),
        pytest.param(
            holds(other_head), "config.json ties model.embed_tokens.weight and lm_head.weight, b", id="another"
        ),
        pytest.param(holds(half_the_rows), "the 264 rows that vocab_size in config.json says; model.embed", id="rows"),
        pytest.param(
            holds(without_a_layer), "of 4 layers (num_hidden_layers in config.json) 1 are in no", id="a layer"
        ),
        pytest.param(holds(quantised), "up_proj.weight is of type F8_E4M3, and the actors train floating", id="8 bits"),
    ],
)
def test_files_that_are_not_all_of_the_model_are_told_by_their_headers(
    model: Path, broken: Callable[[Path], None], message: str
) -> None:
    broken(model)
    found = lines(compose([f"model.path={model}"], experiment="dapo_tiny"))
    assert [line for line in found if message not in line] == [] and len(found) == bool(message), found


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (without_a_shard, "model-2-of-2.safetensors is missing, which model.saf"),
        (without_weights, "holds no weights ("),
    ],
)
def test_without_a_network_the_hubs_cache_must_be_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[Path], None], message: str
) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    shutil.copytree(resolve_path(BASE), snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cfg = compose(["model.path=owner/name"], experiment="dapo_tiny")
    preflight(cfg)
    broken(snapshot)
    [line] = lines(cfg)
    assert re.search(rf"`model.path` \(owner/name\).*{re.escape(message)}.*`hf download owner/name`", line)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "repo_info", lambda *_, **__: None)
    preflight(cfg)  # what lacks is downloaded


@pytest.mark.parametrize(
    ("kind", "attention", "message"),
    [
        ("gptj", "auto", "GPTJForCausalLM computes attention by itself"),
        ("falcon", "sdpa", "FalconForCausalLM computes attention by itself"),
        ("falcon_h1", "sdpa", "FalconH1ForCausalLM keeps a state from token to token"),
        ("gemma3", "auto", "Gemma3ForConditionalGeneration is not of text alone"),
        ("opt", "sdpa", "OPTForCausalLM makes its mask without the positions of tokens"),
        ("opt", "auto", ""),
        ("vit", "auto", "is of the kind vit, of which transformers has no causal language model"),
        ("qwen2", "auto", ""),
        ("qwen2", "sdpa", ""),
    ],
)
def test_a_model_whose_attention_does_not_keep_sequences_apart_is_refused_where_there_are_ranks(
    model: Path, kind: str, attention: str, message: str
) -> None:
    """Those end to end would attend to each other, or those of sequence-parallel ranks to their own part alone."""
    says(model_type=kind)(model)
    cfg = compose([f"model.path={model}"], experiment="dapo_tiny")
    cfg.model.attn_implementation = attention
    preflight(cfg, trains=False)
    problems = lines(cfg)
    assert len(problems) == bool(message), problems
    assert all(line.startswith(f"`model.path` ({model})") and message in line for line in problems), problems
    cfg.model.attn_implementation = "flash_attention_2"  # which is not installed here
    assert any("needs the package flash-attn" in line for line in lines(cfg))


OWN_MODELING = """
from transformers import PreTrainedModel, Qwen2Config


class OwnForCausalLM(PreTrainedModel):
    config_class = Qwen2Config

    def forward(self, input_ids, position_ids=None, attention_mask=None, use_cache=None):
        pass
"""


def test_code_of_a_models_own_is_looked_at_where_it_is_trusted(model: Path) -> None:
    says(auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})(model)
    (model / "modeling_own.py").write_text(OWN_MODELING)
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
    [line] = lines(cfg)
    assert "`rollout.vllm.tensor_parallel_size` (3) must divide the 4 attention heads" in line


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ValueError) as error:
        launch(compose(overrides, experiment="dapo_tiny"))
    return str(error.value).splitlines()


BAD = ["model.path=/no/model", "data.train_files=[/no/a.parquet]", "reward.functions=[{path: mathh}]"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "question,answer\n1+1=,2\n", "is neither .parquet nor .json nor .jsonl"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", '{"prompt": "1+1=", "answer": 2}\n{"prompt": "1+', "row 1 (counted from 0): not valid JSON"),
        ("a.jsonl", '{"prompt": "1+1=", "answer": null}', "row 0 (counted from 0): it lacks an answer"),
        ("a.jsonl", '{"prompt": "1=", "answer": 2}\n{"prompt": "1=", "answer": 3}', "1 of 1 distinct prompts have"),
        (
            "a.jsonl",
            f'{{"prompt": "{"1" * 65}", "answer": 1}}',
            "of 1 prompts 1 are longer than `data.max_prompt_length`",
        ),
    ],
)
def test_rows_are_read_before_anything_heavy_is_loaded(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    cfg = compose([f"data.train_files={tmp_path / name}", f"data.val_files={tmp_path / name}"], experiment="dapo_tiny")
    found = early_problems(cfg, lambda line: None, lambda line: None)
    assert [line.split("`")[1] for line in found] == ["data.train_files", "data.val_files"]
    assert all(said in line for line in found), found


def test_a_cache_that_cannot_be_written_is_the_cause_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file" / "cache"))
    [line] = refused(f"data.train_files=[{tmp_path / 'data'}:train]", f"trainer.output_dir={tmp_path / 'run'}")
    assert "the library `datasets`, which cannot be written ([Errno 20]" in line and "HF_HOME" in line


def test_a_cluster_that_is_not_there_is_told_before_ray_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        [line] = refused(f"trainer.ray_address={address}", f"trainer.output_dir={tmp_path / 'run'}")
    assert line.startswith(f"no Ray at {address} (`trainer.ray_address`") and "refused" in line


def test_ctrl_c_while_inputs_are_checked_is_heard_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose([f"trainer.output_dir={tmp_path / 'run'}"], experiment="dapo_tiny")
    monkeypatch.setattr(run, "preflight", lambda cfg: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(run, "ray_cluster", lambda cfg: pytest.fail("Ray starts"))
    with claim_output_dir(cfg.trainer.output_dir, "auto", asdict(cfg)) as claimed, pytest.raises(KeyboardInterrupt):
        asyncio.run(run.train_until_signal(cfg, claimed, claimed.store, 0.0))


def test_a_hub_that_does_not_answer_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, over = [], threading.Event()

    def ask(_: object, name: str, **options: object) -> None:
        asked.append(name)
        over.wait(60)

    monkeypatch.setattr(hub, "HUB_S", 0.1)
    monkeypatch.setattr(hub, "_silent", None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "repo_info", ask)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    found = refused(
        *("data.train_files=[a/data, b/data]", "model.path=a/model", f"trainer.output_dir={tmp_path / 'run'}")
    )
    over.set()
    assert asked == ["a/data"] and len(found) == 3
    assert all("TimeoutError: no answer within 0.1 s; check the name and the network" in line for line in found), found


def test_what_a_start_is_refused_for_is_told_at_once_the_machine_first(tmp_path: Path) -> None:
    there = f"trainer.output_dir={tmp_path / 'outputs' / 'run'}"
    found = refused(there, "trainer.device=cuda", "data.val_files=[/no/a.parquet]", "reward.functions=[{path: no.py}]")
    assert [line.partition(" ")[0] for line in found] == [
        *("GPUs:", "(trainer.preflight=false", "`data.val_files`", "`reward.functions[0].path`")
    ]
    with pytest.raises(ValueError) as error:
        accepted(typed(_by_hydra(checked_overrides(["dapo_tiny", "trainer.device=cuda", "rollout.n=1", *BAD]))))
    assert [line.partition(" (")[0] for line in str(error.value).splitlines()] == [
        *(
            "GPUs: no GPU",
            "(trainer.preflight=false starts the run all the same)",
            "`rollout.n`",
            "`model.path`",
            "`data.train_files`",
            "`reward.functions[0].path`",
        )
    ], error.value
    [own] = refused(
        there, f"reward.functions=[{{path: math}}, {{path: {tmp_path / 'no.py'}}}]", "trainer.preflight=false"
    )
    assert "no.py" in own
    assert not any(tmp_path.iterdir()), "no folder stays behind of a refused run"


def test_a_name_that_only_the_hub_knows_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers and `datasets` would try for minutes."""
    asked = []

    def ask(_: object, name: str, **options: object) -> None:
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "repo_info", ask)
    monkeypatch.setattr(hub, "_silent", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    given = [
        "data.train_files=[a/data, 'a/data:train']",
        "model.path=a/model",
        f"trainer.output_dir={tmp_path / 'run'}",
    ]
    found = refused(*given)
    assert asked == ["a/data"]
    assert [re.sub(r"\).*", "", line) for line in found] == ["`data.train_files` (a/data", "`model.path` (a/model"]
    assert all("ConnectionError: no route; check the name and the network" in line for line in found)
    for kind, name in (("datasets", "data"), ("models", "model")):
        (tmp_path / f"{kind}--a--{name}" / "refs").mkdir(parents=True)
        (tmp_path / f"{kind}--a--{name}" / "refs" / "main").write_text("0" * 40)
    assert refused(*given, "reward.functions=[{path: no.py}]")[0].startswith("`reward.functions[0].path`")
    assert os.environ["HF_HUB_OFFLINE"] == "1", "what is in the cache is read without asking again"


def test_a_reward_function_is_called_before_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return '1'"
    )
    there = f"trainer.output_dir={tmp_path / 'run'}"
    [line] = refused(there, f"reward.functions=[{{path: math}}, {{path: {tmp_path / 'mine.py'}}}]")
    assert line.startswith("`reward.functions[1]` (") and "gave str as its score; give a number" in line
    assert "reward math: right answer 1.0, wrong -1.0, empty -1.0 (3 rows" in capsys.readouterr().out
