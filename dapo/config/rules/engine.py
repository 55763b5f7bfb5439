"""Checks of vLLM's engine arguments, of `rollout.vllm` or of a judge; an engine would fail on them minutes later. Also
of speculative decoding and of quantized engines.

Argument names are checked here; their values mostly by vLLM when an engine starts.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from dapo.config.algorithm import corrects
from dapo.config.names import ENGINE, JUDGE, engine_arguments, nearest
from dapo.config.rules.model import engine_window
from dapo.config.schema import Config

BACKEND = "distributed_executor_backend"
GPU_MEMORY_UTILIZATION = 0.92  # vLLM's default
# Default tokens per forward pass: vLLM's for an embedded engine, and ours on a CPU.
MAX_NUM_BATCHED_TOKENS, CPU_BATCHED_TOKENS = 2048, 8192

SPECULATION, QUANTIZATION = "rollout.vllm.speculative_config", "rollout.vllm.quantization"
# Package that each drafting method needs besides vLLM. Other methods need a second model, which no weight sync updates.
METHODS = {"ngram": "numba", "ngram_gpu": "", "suffix": "arctic_inference"}
# Quantizations that vLLM applies to each weight as it arrives.
QUANTIZED = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
ON_CPU = "fp8_per_channel"  # the only one with kernels in vLLM's CPU build
FP8_LOGPROB_DIFF = 0.05  # the bound's default, and its minimum for engines with 3 mantissa bits
SCHEDULE = "num_speculative_tokens_per_batch_size"
FEW_REQUESTS = 16  # with at most this many requests per engine, speculation may always be on


def arguments(section: str, given: Mapping[str, Any], own: Mapping[str, str]) -> Iterator[str]:
    """Reports arguments that dapo sets itself, and unknown ones. own: by name, what to use instead of the former."""
    for name, instead in own.items():
        if name in given:
            yield f"`{section}.{name}` is set by dapo itself; remove it and use {instead}"
    known = engine_arguments()
    for name in sorted(given.keys() - own.keys() - known) if known else ():
        yield f"`{section}.{name}` is no engine argument of the installed vLLM; {nearest(name, known)}".rstrip("; ")


def starts(cfg: Config) -> Iterator[str]:
    args = cfg.rollout.vllm
    one = args.get("tensor_parallel_size", 1) == args.get("pipeline_parallel_size", 1) == 1
    if (backend := args.get(BACKEND, "mp")) not in (("mp", "uni") if one else ("mp",)):
        yield (
            f"`{ENGINE}.{BACKEND}` ({backend}) must be mp{' or uni' if one else ''}: an engine starts its processes "
            "itself, on the GPUs of one node; leave it out"
        )


def random_weights(cfg: Config) -> Iterator[str]:
    if cfg.rollout.vllm.get("load_format") == "dummy":
        yield (
            f"`{ENGINE}.load_format` (dummy) gives engines random weights, and without actors they get no others; "
            "leave it out"
        )


def stages(cfg: Config, device: str) -> Iterator[str]:
    """Refuses pipeline stages on a CPU without compilation: vLLM's CPU engine allocates buffers only when compiling."""
    name, own = "pipeline_parallel_size", cfg.reward.judge.engine
    for key, args in {ENGINE: cfg.rollout.vllm, **({JUDGE: own.vllm} if own.path else {})}.items():
        count = args.get(name, 1)
        if device == "cpu" and args.get("enforce_eager", True) and isinstance(count, int) and count > 1:
            yield (
                f"`{key}.{name}` ({count}) must be 1 on a CPU, where vLLM's engine dies at its first pass over "
                f"several stages; use `{key}.tensor_parallel_size`"
            )


def batches(cfg: Config, device: str) -> Iterator[str]:
    """Reports `max_num_batched_tokens` below what vLLM requires, and other limits above the values that bound them.
    device: cpu, cuda, or auto if not known yet."""
    args = cfg.rollout.vllm
    window = engine_window(cfg)
    tokens, sequences = args.get("max_num_batched_tokens"), args.get("max_num_seqs")
    whole = args.get("enable_chunked_prefill", False if device == "cpu" else None) is False
    if whole and tokens is not None and tokens < window:
        yield (
            f"`{ENGINE}.max_num_batched_tokens` ({tokens}) must be at least the longest sequence ({window} tokens), "
            f"because prompts are not split (`{ENGINE}.enable_chunked_prefill` is false"
            f"{'' if 'enable_chunked_prefill' in args else ' on a CPU'}); raise it, or leave it out"
        )
    most = {
        "max_num_active_seqs": (sequences, f"`{ENGINE}.max_num_seqs` ({sequences})"),
        "long_prefill_token_threshold": (window, f"the longest sequence ({window} tokens)"),
    }
    for name, (bound, words) in most.items():
        if isinstance(given := args.get(name), int) and bound is not None and given > bound:
            yield f"`{ENGINE}.{name}` ({given}) must be at most {words}; lower it, or leave it out"
    if tokens is None and device != "auto":
        least = CPU_BATCHED_TOKENS if device == "cpu" else MAX_NUM_BATCHED_TOKENS
        least *= 2 if args.get("performance_mode") == "throughput" and device != "cpu" else 1
        tokens = max(window, least) if whole else least
    if tokens is not None and sequences is not None and sequences > tokens:
        given = "" if "max_num_batched_tokens" in args else ", the default"
        yield (
            f"`{ENGINE}.max_num_batched_tokens` ({tokens}{given}) must be at least `{ENGINE}.max_num_seqs` "
            f"({sequences}), for each sequence that runs takes a token of a pass; raise the one or lower the other"
        )


def decoding(cfg: Config) -> Iterator[str]:
    if (speculative := cfg.rollout.vllm.get("speculative_config")) is not None:
        yield from _speculation(speculative, cfg.rollout.vllm.get("max_num_seqs"))
        for name, min_p in ("rollout", cfg.rollout.min_p), ("eval", cfg.eval.min_p):
            if min_p:
                yield (
                    f"`{name}.min_p` ({min_p}) does not go with `{SPECULATION}` in vLLM; set it to 0, or leave out "
                    "speculation"
                )
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
    if not corrects(cfg.algorithm):
        yield (
            f"`{QUANTIZATION}` ({given}) samples from a coarser policy than the one that trains, and "
            "`algorithm.rollout_correction.mode` (none) does not correct for it; take truncate or mask, or a loss "
            "whose own ratio does (`algorithm.rollout_correction.use_rollout_logprobs=true`)"
        )
    if (bound := cfg.weight_sync.max_mean_logprob_diff) < FP8_LOGPROB_DIFF:
        yield (
            f"`weight_sync.max_mean_logprob_diff` ({bound:g}) leaves no room for `{QUANTIZATION}` ({given}), whose "
            f"rounding alone would set batches aside; raise it to {FP8_LOGPROB_DIFF:g} or more"
        )


def replayed_experts(cfg: Config) -> Iterator[str]:
    """Reports engines that cannot return experts: vLLM keeps those of a shared prefix beside its cache."""
    args = cfg.rollout.vllm
    if not cfg.rollout.replay_experts:
        return
    if args.get("enable_prefix_caching") is False:
        yield (
            f"`{ENGINE}.enable_prefix_caching` (False) must be true with `rollout.replay_experts`, for vLLM returns "
            "the experts of a token only with its prefix cache; leave it out"
        )
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if args.get(name, 1) != 1:
            yield (
                f"`{ENGINE}.{name}` ({args[name]}) must be 1 with `rollout.replay_experts`, for vLLM does not collect "
                f"the experts of several stages or parts; use `{ENGINE}.tensor_parallel_size`"
            )
