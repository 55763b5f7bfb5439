"""Engine arguments that vLLM would refuse when an engine starts: each is named before any worker starts."""

import dataclasses
import enum
import typing
from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.config.facts.vllm_source import BOUNDS, Section, allowed, engine_arguments
from dapo.config.names import JUDGE
from dapo.config.rules.engine import batches, values

V = "rollout.vllm"
NGRAM = "method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4"
SCHEDULE = "num_speculative_tokens_per_batch_size: [[1, 256, 4]]"


def said(*overrides: str, experiment: str = "dapo_tiny") -> list[str]:
    with pytest.raises(ValueError) as error:
        compose(overrides, experiment)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param([f"{V}.enforce_eager=maybe"], f"`{V}.enforce_eager` (maybe) must be true or false", id="bool"),
        pytest.param(
            [f"{V}.kv_cache_dtype=fp9"], f"`{V}.kv_cache_dtype` (fp9) must be one of auto, float16, ", id="choices"
        ),
        pytest.param(
            [f"{V}.attention_backend=FLASH_ATN"],
            f"`{V}.attention_backend` (FLASH_ATN) must be one of auto, ",
            id="enum",
        ),
        pytest.param([f"{V}.block_size=16k"], f"`{V}.block_size` (16k) must be a whole number", id="whole number"),
        pytest.param([f"{V}.block_size=0"], f"`{V}.block_size` (0) must be greater than 0", id="bound"),
        pytest.param([f"{V}.watermark=1.5"], f"`{V}.watermark` (1.5) must be below 1", id="upper bound"),
        pytest.param([f"{V}.watermark=nan"], f"`{V}.watermark` (nan) must be at least 0", id="no number"),
        pytest.param([f"{V}.revision=1234567"], f"`{V}.revision` (1234567) must be text", id="text"),
        pytest.param(
            [f"{V}.compilation_config=3"], f"`{V}.compilation_config` (3) must be a mapping", id="section as a number"
        ),
        pytest.param(
            [f"{V}.compilation_config.cudagraph_capture_size=[1]"],
            f"`{V}.compilation_config.cudagraph_capture_size` is no field of the installed vLLM's CompilationConfig; "
            "did you mean `cudagraph_capture_sizes`?",
            id="a section's field misspelt",
        ),
        pytest.param(
            [f"{V}.compilation_config.cudagraph_mode=FULL_AND_PIECWISE"],
            f"`{V}.compilation_config.cudagraph_mode` (FULL_AND_PIECWISE) must be a whole number or one of auto, NONE, "
            "PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE; did you mean `FULL_AND_PIECEWISE`?",
            id="a section's enum",
        ),
        pytest.param(
            [f"{V}.kernel_config={{enable_cutedsl_warmups: true}}"],
            f"`{V}.kernel_config.enable_cutedsl_warmups` is no field of",
            id="a section at once",
        ),
        pytest.param(
            [f"{V}.eplb_config.window_size=many"], f"`{V}.eplb_config.window_size` (many) must be a whole", id="field"
        ),
        pytest.param(
            [f"{V}.speculative_config={{{NGRAM}, {SCHEDULE}, prompt_lookup_mni: 2}}"],
            f"`{V}.speculative_config.prompt_lookup_mni` is no field of the installed vLLM's SpeculativeConfig; did "
            "you mean `prompt_lookup_min`?",
            id="speculation misspelt",
        ),
        pytest.param(
            [f"{V}.speculative_config={{{NGRAM}, {SCHEDULE}, prompt_lookup_min: 0}}"],
            f"`{V}.speculative_config.prompt_lookup_min` (0) must be ",
            id="speculation from nothing",
        ),
        pytest.param(
            [f"{V}.max_num_batched_tokens=100", f"{V}.max_num_seqs=16"],
            f"`{V}.max_num_batched_tokens` (100) must be at least the longest sequence (192 tokens), because prompts "
            f"are not split (`{V}.enable_chunked_prefill` is false on a CPU); raise it",
            id="a CPU's pass",
        ),
        pytest.param(
            [f"{V}.max_num_batched_tokens=192"],
            f"`{V}.max_num_batched_tokens` (192) must be at least `{V}.max_num_seqs` (256)",
            id="fewer tokens than sequences",
        ),
        pytest.param(
            [f"{V}.max_num_seqs=8193"],
            f"`{V}.max_num_batched_tokens` (8192, the default) must be at least `{V}.max_num_seqs` (8193)",
            id="more sequences than a CPU's pass",
        ),
        pytest.param(
            [f"{V}.max_num_active_seqs=257"],
            f"`{V}.max_num_active_seqs` (257) must be at most `{V}.max_num_seqs` (256)",
            id="more active sequences than there are",
        ),
        pytest.param(
            [f"{V}.long_prefill_token_threshold=193"],
            f"`{V}.long_prefill_token_threshold` (193) must be at most the longest sequence (192 tokens)",
            id="longer than the longest",
        ),
        pytest.param(
            [f"{V}.load_format=safetensor"],
            f"`{V}.load_format` (safetensor) must be one of auto, hf, dummy, ",
            id="format of weights",
        ),
        pytest.param(
            [f"{V}.distributed_executor_backend=ray"],
            f"`{V}.distributed_executor_backend` (ray) must be mp or uni: ",
            id="another's processes",
        ),
        pytest.param(
            [f"{V}.distributed_executor_backend=uni", f"{V}.tensor_parallel_size=2"],
            f"`{V}.distributed_executor_backend` (uni) must be mp: ",
            id="two GPUs in one process",
        ),
        pytest.param(
            [f"{V}.pipeline_parallel_size=2"],
            f"`{V}.pipeline_parallel_size` (2) must be 1 on a CPU, where ",
            id="stages on a CPU",
        ),
        pytest.param(
            [f"{V}.pipeline_parallel_size=5", f"{V}.enforce_eager=false"],
            f"`{V}.pipeline_parallel_size` (5) must be at most 4, the layers of `model.path` (",
            id="more stages than layers",
        ),
        pytest.param(
            [f"{V}.seed=3"],
            f"`{V}.seed` is set by dapo itself; remove it and use trainer.seed",
            id="a seed without effect",
        ),
    ],
)
def test_a_value_that_no_engine_takes_is_named(overrides: list[str], message: str) -> None:
    [line] = said(*overrides)
    assert line.startswith(message), line


def test_a_gpus_engine_splits_prompts_unless_it_is_told_not_to() -> None:
    tokens = [f"{V}.max_num_batched_tokens=4096", f"{V}.max_num_seqs=64"]
    cfg = compose(tokens, "dapo_qwen7b")
    assert list(batches(cfg, "cuda")) == []
    [line] = said(*tokens, f"{V}.enable_chunked_prefill=false", experiment="dapo_qwen7b")
    assert f"(`{V}.enable_chunked_prefill` is false)" in line
    cfg.rollout.vllm = {"max_num_seqs": 2049}
    [line] = batches(cfg, "cuda")
    assert line.startswith(
        f"`{V}.max_num_batched_tokens` (2048, the default) must be at least `{V}.max_num_seqs` (2049"
    )
    cfg.rollout.vllm["performance_mode"] = "throughput"  # doubles it
    assert list(batches(cfg, "cuda")) == []


def test_the_processes_of_an_engine_may_be_chosen_as_dapo_starts_them() -> None:
    two = ["distributed_executor_backend=mp", "tensor_parallel_size=2", "load_format=dummy"]
    stages = ["pipeline_parallel_size=2", "enforce_eager=false"]
    for given in (two, stages, ["distributed_executor_backend=uni", "max_num_active_seqs=256"]):
        assert compose([f"{V}.{one}" for one in given], "dapo_tiny")


@pytest.mark.parametrize(
    "given",
    [
        {"enforce_eager": True, "enable_prefix_caching": "off", "disable_custom_all_reduce": 1},
        {"block_size": "16", "cpu_offload_gb": 2, "kv_cache_memory_bytes": 1e9, "watermark": "0.1", "hf_token": 12},
        {"kv_cache_dtype": "FP8", "moe_backend": "deep-gemm", "kv_cache_dtype_skip_layers": ["0"]},
        {
            "hf_overrides": {"rope_theta": 1},
            "attention_backend": "FLASH_ATTN",
            "quantization": "fp8",
            "load_format": "x",
        },
        {"compilation_config": {"mode": 3, "cudagraph_mode": "full"}, "attention_config": {"backend": "flash_attn"}},
        {"compilation_config": {"mode": "none", "cudagraph_capture_sizes": [1, 2]}, "attention_config": {}},
        {"served_model_name": ["a", "b"], "cpu_offload_params": ["w"], "max_lora_rank": 16, "revision": None},
        {"diffusion_config": '{"a": 1}', "override_generation_config": {"temperature": 1.0}},
    ],
)
def test_what_vllm_may_take_is_left_to_it(given: dict[str, Any]) -> None:
    assert list(values(V, given)) == []


def test_a_judges_arguments_are_looked_at_too() -> None:
    judge = ["reward.functions=[{path: math}, {path: judge}]", "reward.judge.engine.path=pkg://dapo.tiny/base"]
    assert said(*judge, "reward.judge.engine.vllm={enforce_eager: maybe}") == [
        "`reward.judge.engine.vllm.enforce_eager` (maybe) must be true or false"
    ]
    [line] = said(*judge, "reward.judge.engine.vllm={pipeline_parallel_size: 2}")
    assert line.startswith("`reward.judge.engine.vllm.pipeline_parallel_size` (2) must be 1 on a CPU, where ")
    compose([*judge, "reward.judge.engine.vllm={pipeline_parallel_size: 2, enforce_eager: false}"], "dapo_tiny")
    compose(["reward.judge.engine.vllm={pipeline_parallel_size: 2}"], "dapo_tiny")  # of which there is none


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


def test_the_choices_and_bounds_are_those_of_the_vllm_that_is_imported() -> None:
    """Read out of its source: a type that is read wrongly would refuse what an engine takes."""
    vllm = pytest.importorskip("vllm")
    from vllm import config

    hints = {field.name: field.type for field in dataclasses.fields(vllm.AsyncEngineArgs)}
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
