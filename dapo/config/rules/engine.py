"""Checks of vLLM's engine arguments, of `rollout.vllm` or of a judge; an engine would fail on them minutes later.

Argument names are checked here; their values mostly by vLLM when an engine starts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dapo.config.facts.vllm_source import engine_arguments
from dapo.config.names import ENGINE, JUDGE, nearest
from dapo.config.rules.model import engine_window
from dapo.config.schema import Config

BACKEND = "distributed_executor_backend"
# Default tokens per forward pass: vLLM's for an embedded engine, and ours on a CPU.
MAX_NUM_BATCHED_TOKENS, CPU_BATCHED_TOKENS = 2048, 8192


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
