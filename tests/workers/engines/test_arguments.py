"""What engines are started with: what follows from other keys, the needs of a device, and a person's own above both."""

from typing import Any

import pytest

from dapo.config.schema import Config
from dapo.workers.engines.arguments import engine_args


def args(device: str, colocate: str = "", **vllm: Any) -> dict[str, Any]:
    cfg = Config()
    cfg.rollout.vllm |= vllm
    cfg.trainer.colocate = colocate or cfg.trainer.colocate
    return engine_args(cfg, device)


def test_engine_arguments():
    found, data = args("cpu", max_num_seqs=7, enforce_eager=False), Config().data
    assert found["max_num_seqs"] == 7 and found["enforce_eager"] is False and found["enable_chunked_prefill"] is False
    assert found["max_model_len"] == data.max_prompt_length + data.max_response_length
    assert "enforce_eager" not in args("cuda")
    assert "hf_overrides" not in found
    cfg = Config()
    cfg.model.head_dtype, cfg.rollout.vllm = "float32", {"hf_overrides": {"rope_theta": 7.0}}
    assert engine_args(cfg, "cuda")["hf_overrides"] == {"rope_theta": 7.0, "head_dtype": "float32"}
    assert cfg.rollout.vllm == {"hf_overrides": {"rope_theta": 7.0}}
    executor = "distributed_executor_backend"  # vLLM's own choice ends at "bundle cannot have more than 1 GPU"
    assert executor not in args("cuda") and args("cuda", tensor_parallel_size=4)[executor] == "mp"
    assert args("cuda", tensor_parallel_size=4, **{executor: "external"})[executor] == "external"
    assert args("cuda", "time")["enable_sleep_mode"] is True
    assert not any(
        "enable_sleep_mode" in each for each in (args("cuda"), args("cpu", "time"))
    )  # a CPU has no such mode


@pytest.mark.parametrize(
    ("vllm", "last"),
    [
        ({"max_num_seqs": 1024}, [1008, 1024]),
        ({"max_num_seqs": 1000, "compilation_config": {"cudagraph_mode": "FULL"}}, [992, 1000]),
        ({"max_num_seqs": 512}, None),
        ({}, None),
        ({"max_num_seqs": 1024, "enforce_eager": True}, None),
        ({"max_num_seqs": 1024, "max_cudagraph_capture_size": 64}, None),
        ({"max_num_seqs": 1024, "compilation_config": {"cudagraph_capture_sizes": [64]}}, None),
        ({"max_num_seqs": 1024, "speculative_config": {"method": "ngram"}}, None),  # several tokens for each sequence
    ],
)
def test_a_full_engine_runs_a_cuda_graph_where_vllm_would_stop_at_512(
    vllm: dict[str, Any], last: list[int] | None
) -> None:
    sizes = args("cuda", **vllm).get("cudagraph_capture_sizes")
    assert (sizes and sizes[-2:]) == last
    assert "cudagraph_capture_sizes" not in args("cpu", **vllm)
