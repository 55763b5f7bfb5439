"""Configurations that are refused before any worker starts, and their neighbours that are accepted: see refused.tsv."""

import dataclasses
import enum
import importlib.util
import re
import typing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dapo.config import elsewhere
from dapo.config.checks import validate
from dapo.config.compose import compose
from dapo.config.facts.vllm_source import BOUNDS, Section, allowed, engine_arguments
from dapo.config.names import JUDGE, is_open, known_keys
from dapo.config.rules.engine import batches, values
from dapo.config.schema import Config
from dapo.driver.preflight import preflight

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


def test_default_tokens_of_a_gpus_pass() -> None:
    cfg = compose([], "dapo_qwen7b")
    cfg.rollout.vllm = {"max_num_seqs": 2049}
    [line] = batches(cfg, "cuda")
    assert line.startswith(
        f"`{V}.max_num_batched_tokens` (2048, the default) must be at least `{V}.max_num_seqs` (2049"
    )
    cfg.rollout.vllm["performance_mode"] = "throughput"  # doubles the default
    assert list(batches(cfg, "cuda")) == []


@pytest.mark.parametrize(
    "given",
    [
        {"enforce_eager": True, "enable_prefix_caching": "off", "disable_custom_all_reduce": 1},
        {"block_size": "16", "cpu_offload_gb": 2, "kv_cache_memory_bytes": 1e9, "watermark": "0.1", "hf_token": 12},
        {"kv_cache_dtype": "FP8", "moe_backend": "deep-gemm", "kv_cache_dtype_skip_layers": ["0"]},
        {"hf_overrides": {"rope_theta": 1}, "attention_backend": "FLASH_ATTN", "quantization": "fp8"},
        {"compilation_config": {"mode": 3, "cudagraph_mode": "full"}, "attention_config": {"backend": "flash_attn"}},
        {"compilation_config": {"mode": "none", "cudagraph_capture_sizes": [1, 2]}, "attention_config": {}},
        {"served_model_name": ["a", "b"], "cpu_offload_params": ["w"], "max_lora_rank": 16, "revision": None},
        {"diffusion_config": '{"a": 1}', "override_generation_config": {"temperature": 1.0}, "load_format": "x"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_vllm_may_take_is_left_to_it(given: dict[str, Any]) -> None:
    assert list(values(V, given)) == []


def test_a_judges_arguments_are_what_a_command_line_reads() -> None:
    read = {"max_model_len": "8k", "max_num_batched_tokens": "1.5K", "revision": 1234567, "served_model_name": "a"}
    read |= {"kv_cache_dtype_skip_layers": 0, "speculative_config": '{"method": "ngram"}', "enforce_eager": True}
    assert list(values(JUDGE, read, spoken=True)) == []
    assert len(list(values(V, read | {"block_size": "8k"}))) == 6
    refused = {"max_num_seqs": "many", "kv_cache_dtype": "fp9", "block_size": 0, "compilation_config": 3}
    assert len(list(values(JUDGE, refused, spoken=True))) == len(refused)


def literals(hint: Any) -> set[Any]:
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"auto", *hint.__members__}
    return set().union(*(literals(one) for one in typing.get_args(hint)))


def test_arguments_choices_and_bounds_are_those_of_the_vllm_that_is_imported() -> None:
    """Read out of its source: a type that is read wrongly would refuse what an engine takes."""
    vllm = pytest.importorskip("vllm")
    from vllm import config

    hints = {field.name: field.type for field in dataclasses.fields(vllm.AsyncEngineArgs)}
    assert engine_arguments() == set(hints)
    choices = {name: set(allowed(name).choices) for name in engine_arguments()}
    assert {name: found for name, found in choices.items() if found} == {
        name: literals(hints[name]) for name in engine_arguments() if choices[name]
    }
    assert {"kv_cache_dtype", "runner", "max_lora_rank", "performance_mode"} <= {
        name for name in choices if choices[name]
    }
    sections = {one.name: one for name in engine_arguments() for one in allowed(name).sections}
    assert {"CompilationConfig", "KernelConfig", "SpeculativeConfig"} <= set(sections)
    for name, section in sections.items():
        if kind := getattr(config, name, None):
            same_as(kind, section)


def same_as(kind: Any, section: Section) -> None:
    """Compares the bounds and names of a class's fields with pydantic's."""
    there = kind.__pydantic_fields__
    assert set(there) <= set(section.fields)
    for name, field in there.items():
        bounds = {(bound, getattr(one, bound)) for one in field.metadata for bound in BOUNDS if hasattr(one, bound)}
        assert set(section.fields[name].bounds) in (bounds, set()), (section.name, name)
