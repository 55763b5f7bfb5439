"""Builds vLLM's keyword arguments from the configuration and the device. Does not import vLLM."""

from typing import Any

from dapo.config.derived import gpus_per_engine, shares_gpus, support_size
from dapo.config.rules.engine import CPU_BATCHED_TOKENS
from dapo.config.schema import Config

# Where vLLM itself, which returns experts only on GPUs, refuses `enable_return_routed_experts`.
CPU_EXPERTS_SCHEDULER = "dapo.workers.engines.scheduling.scheduler_with_experts"
# The largest batch for which vLLM captures CUDA graphs by itself on Hopper, and its keys for others.
CAPTURED_SEQS, CAPTURE_KEYS = 512, ("max_cudagraph_capture_size", "cudagraph_capture_sizes")
DRAWN = "drawn"  # in a request's `extra_args`: tokens of its response that an engine has drawn before
VLLM_MAX_LOGPROBS = 20  # vLLM's default: the most log-probabilities that a request may ask for per position


def engine_args(cfg: Config, device: str) -> dict[str, Any]:
    """Returns vLLM's arguments. Entries of `rollout.vllm` override those derived from other keys."""
    window = cfg.data.max_prompt_length + cfg.data.max_response_length
    args: dict[str, Any] = {
        "dtype": cfg.model.dtype,
        "max_model_len": window,
        "seed": cfg.trainer.seed,
        "trust_remote_code": cfg.model.trust_remote_code,
        "load_format": "safetensors",  # vLLM would also accept pickles
    }
    if (size := support_size(cfg)) > VLLM_MAX_LOGPROBS:
        args["max_logprobs"] = size
    if cfg.rollout.replay_experts and device == "cpu":
        args["scheduler_cls"] = CPU_EXPERTS_SCHEDULER
    elif cfg.rollout.replay_experts:
        args["enable_return_routed_experts"] = True
    given = cfg.rollout.vllm
    if cfg.model.head_dtype != "auto":
        given = given | {"hf_overrides": {**given.get("hf_overrides", {}), "head_dtype": cfg.model.head_dtype}}
    if device == "cpu":
        args |= {
            "enforce_eager": True,
            # A seeded request whose prefill is split kills a CPU engine ("CPU Generator does not use offset").
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(window, CPU_BATCHED_TOKENS),
        }
        if gpus_per_engine(given) == 1:
            args["distributed_executor_backend"] = "uni"
        return args | given
    if sizes := _capture_sizes(given):
        args["cudagraph_capture_sizes"] = sizes
    if shares_gpus(cfg):
        args["enable_sleep_mode"] = True
    if gpus_per_engine(given) > 1:
        # Inside a placement group vLLM would choose Ray, which rejects our single-node bundles of several GPUs.
        args["distributed_executor_backend"] = "mp"
    return args | given


def _capture_sizes(given: dict[str, Any]) -> list[int]:
    """Returns vLLM's steps of batch sizes up to `max_num_seqs`, so that a full engine runs a CUDA graph; empty if its
    own choice reaches that, or other arguments decide. A maximum alone would end at a multiple of 16."""
    most, compilation = given.get("max_num_seqs") or 0, given.get("compilation_config") or {}
    decided = given.get("enforce_eager") or given.get("speculative_config") or not isinstance(compilation, dict)
    if most <= CAPTURED_SEQS or decided or any(each.get(key) for each in (given, compilation) for key in CAPTURE_KEYS):
        return []
    return [1, 2, 4, *range(8, 256, 8), *range(256, most, 16), most]
