"""Checks of speculative decoding and of quantized engines."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from dapo.config.schema import Config

SPECULATION, QUANTIZATION = "rollout.vllm.speculative_config", "rollout.vllm.quantization"
# Package that each drafting method needs besides vLLM. Other methods need a second model, which no weight sync updates.
METHODS = {"ngram": "numba", "ngram_gpu": "", "suffix": "arctic_inference"}
# Quantizations that vLLM applies to each weight as it arrives.
QUANTIZED = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
ON_CPU = "fp8_per_channel"  # the only one with kernels in vLLM's CPU build
FP8_LOGPROB_DIFF = 0.05  # the bound's default, and its minimum for engines with 3 mantissa bits
SCHEDULE = "num_speculative_tokens_per_batch_size"
FEW_REQUESTS = 16  # with at most this many requests per engine, speculation may always be on


def decoding(cfg: Config) -> Iterator[str]:
    if (speculative := cfg.rollout.vllm.get("speculative_config")) is not None:
        yield from _speculation(speculative, cfg.rollout.vllm.get("max_num_seqs"))
    if (quantization := cfg.rollout.vllm.get("quantization")) not in (None, *QUANTIZED):
        yield (
            f"`{QUANTIZATION}` ({quantization}) must be one of {', '.join(QUANTIZED)}: these quantize each weight sync "
            "as it arrives"
        )
    yield from on_device(cfg, cfg.trainer.device)


def _speculation(given: Any, max_num_seqs: int | None) -> Iterator[str]:
    if not isinstance(given, dict) or given.get("method") not in METHODS:
        yield (
            f"`{SPECULATION}` ({given}) must be a mapping whose method is one of {', '.join(METHODS)}, as in "
            f"{SPECULATION}={{method: ngram, num_speculative_tokens: 4, prompt_lookup_min: 2, prompt_lookup_max: 4}}; "
            "other methods need a second model, which the weight sync does not renew"
        )
        return
    method, tokens, schedule = given["method"], given.get("num_speculative_tokens"), given.get(SCHEDULE)
    if (package := METHODS[method]) and importlib.util.find_spec(package) is None:
        yield f"`{SPECULATION}.method` ({method}) needs the package {package}, which is not installed; install it"
    if not isinstance(tokens, int) or tokens < 1:
        yield f"`{SPECULATION}.num_speculative_tokens` ({tokens}) must be a whole number of at least 1; 4 is usual"
    if method != "suffix" and not given.get("prompt_lookup_max"):
        yield f"`{SPECULATION}.prompt_lookup_max` (missing) must be given for {method}: the longest n-gram; 4 is usual"
    if (how := given.get("rejection_sample_method", "standard")) != "standard":
        yield (
            f"`{SPECULATION}.rejection_sample_method` ({how}) must be standard, for which the tests show that "
            "responses keep the policy's distribution; leave it out"
        )
    if method == "suffix" and schedule:
        yield f"`{SPECULATION}.{SCHEDULE}` ({schedule}) does not work with suffix; take ngram or leave it out"
    elif method != "suffix" and not schedule and (max_num_seqs is None or max_num_seqs > FEW_REQUESTS):
        most = max_num_seqs or 256
        yield (
            f"`{SPECULATION}.{SCHEDULE}` is missing, and `rollout.vllm.max_num_seqs` ({max_num_seqs or 'not given'}) "
            "lets large batches run, in which speculation costs more than it gains; give the tokens to draft by the "
            f"requests that run, such as [[1, {FEW_REQUESTS}, {tokens}], [{FEW_REQUESTS + 1}, {most}, 0]], or "
            f"[[1, {most}, {tokens}]] to speculate always"
        )


def on_device(cfg: Config, device: str) -> Iterator[str]:
    """Reports engines for which vLLM has no kernels on `device`, cpu or cuda."""
    given = cfg.rollout.vllm.get("quantization")
    if device == "cpu" and given not in (None, ON_CPU):
        yield (
            f"`{QUANTIZATION}` ({given}) needs GPUs that compute in FP8, and the engines run on a CPU "
            f"(`trainer.device` {cfg.trainer.device}); take {ON_CPU}, or leave it out"
        )


def quantized_training(cfg: Config) -> Iterator[str]:
    if (given := cfg.rollout.vllm.get("quantization")) is None:
        return
    if cfg.algorithm.rollout_correction.mode == "none":
        yield (
            f"`{QUANTIZATION}` ({given}) samples from a coarser policy than the one that trains, and "
            "`algorithm.rollout_correction.mode` (none) does not correct for it; take truncate or mask (with "
            "`algorithm.rollout_correction.use_rollout_logprobs=false`)"
        )
    if (bound := cfg.weight_sync.max_mean_logprob_diff) < FP8_LOGPROB_DIFF:
        yield (
            f"`weight_sync.max_mean_logprob_diff` ({bound:g}) leaves no room for `{QUANTIZATION}` ({given}), whose "
            f"rounding alone would set batches aside; raise it to {FP8_LOGPROB_DIFF:g} or more"
        )
