"""What engines are started with: what follows from other keys, the needs of a device, and a person's own above both."""

from typing import Any

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
