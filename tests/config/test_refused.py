"""Configurations that are refused before any worker starts, and their neighbours that are accepted: see refused.tsv."""

import dataclasses
import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dapo.config import elsewhere
from dapo.config.checks import validate
from dapo.config.compose import compose
from dapo.config.facts.model_shape import read_config
from dapo.config.names import engine_arguments, is_open, known_keys
from dapo.config.rules.engine import batches, replayed_experts
from dapo.config.rules.model import config_problems
from dapo.config.schema import Config
from dapo.driver.preflight import preflight
from tests.support.training.model_families import FAMILIES, save_config

V = "rollout.vllm"
SPECULATION = "rollout.vllm.speculative_config={method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4}"
FP8 = [f"{V}.quantization=fp8_per_tensor", "algorithm.rollout_correction.mode=truncate"]


def table() -> list[Any]:
    """Rows of refused.tsv: overrides, then the words of each line of the message, in their order; none if it is
    accepted. Overrides behind a section's title hold for all of its rows."""
    title, common, rows = "", [], []
    text = Path(__file__).with_name("refused.tsv").read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        first, _, second = line.partition("\t")
        if first.startswith("# "):
            title, common = first, second.split(" & ") if second else []
            continue
        words = [one.split("...") for one in second.split(" & ")] if second else []
        overrides = [*common, *first.split(" & ")]
        rows.append(pytest.param(overrides, words, "preflight" in title, id=f"line-{number}"))
    return rows


def composed(overrides: list[str]) -> Config:
    own = any(override.startswith("+experiment=") for override in overrides)
    return compose(overrides, None if own else "dapo_tiny")


@pytest.fixture
def numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that drafts, installed or not."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "numba" or find(name) if name else None)


@pytest.mark.parametrize(("overrides", "words", "tried"), table())
def test_each_problem_is_a_line_with_key_value_and_remedy(
    overrides: list[str], words: list[list[str]], tried: bool, numba: None
) -> None:
    call = partial(preflight, composed(overrides)) if tried else partial(composed, overrides)
    if not words:
        call()
        return
    with pytest.raises(ValueError) as error:
        call()
    lines = str(error.value).splitlines()
    assert len(lines) == len(words), (overrides, lines)
    for line, parts in zip(lines, words, strict=True):
        assert re.search(".*".join(map(re.escape, parts)), line), (overrides, line)


def test_names_of_other_systems_lead_to_keys_that_exist() -> None:
    for words in {*elsewhere.VERL.values(), *elsewhere.TRL.values()}:
        keys = [key.partition("=")[0] for key in re.findall(r"`([a-z_]+\.[a-z_.=]+)`", words)]
        assert not [key for key in keys if key not in known_keys() and not is_open(key) and key != "samples.sqlite"]


def test_without_the_package_that_drafts_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"speculative_config.method` \(ngram\) needs the package numba"):
        compose([SPECULATION, f"{V}.max_num_seqs=16"], "dapo_tiny")


def test_engines_alone_need_no_correction() -> None:
    cfg = compose([*FP8, "weight_sync.max_mean_logprob_diff=0.1"], "dapo_tiny")
    cfg.algorithm.rollout_correction.mode, cfg.weight_sync.max_mean_logprob_diff = "none", 1e-4
    with pytest.raises(ValueError, match="coarser policy"):
        validate(cfg)
    validate(cfg, trains=False)


def test_engines_that_cannot_return_experts(tmp_path: Path) -> None:
    save_config(FAMILIES["Qwen3-MoE"], tmp_path)
    cfg = compose([], "dapo_tiny")
    cfg.model.path, cfg.rollout.replay_experts = str(tmp_path), True
    assert [*replayed_experts(cfg), *config_problems(cfg, read_config(str(tmp_path)), trains=True)] == []
    cfg.rollout.vllm = {"enable_prefix_caching": False, "pipeline_parallel_size": 2}
    first, second = replayed_experts(cfg)
    assert first.startswith(f"`{V}.enable_prefix_caching` (False) must be true with `rollout.replay_experts`")
    assert second.startswith(f"`{V}.pipeline_parallel_size` (2) must be 1 with `rollout.replay_experts`")


def test_default_tokens_of_a_gpus_pass() -> None:
    cfg = compose([], "dapo_qwen7b")
    cfg.rollout.vllm = {"max_num_seqs": 2049}
    [line] = batches(cfg, "cuda")
    assert line.startswith(
        f"`{V}.max_num_batched_tokens` (2048, the default) must be at least `{V}.max_num_seqs` (2049"
    )
    cfg.rollout.vllm["performance_mode"] = "throughput"  # doubles the default
    assert list(batches(cfg, "cuda")) == []


def test_the_names_of_arguments_are_those_of_the_vllm_that_is_imported() -> None:
    vllm = pytest.importorskip("vllm")
    assert engine_arguments() == {field.name for field in dataclasses.fields(vllm.AsyncEngineArgs)}
