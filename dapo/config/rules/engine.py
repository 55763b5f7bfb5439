"""Checks of vLLM's engine arguments before any worker starts; an engine would die of them minutes later.

In: `rollout.vllm`, or a judge's. Out: one line per problem, with key, value and remedy. What each argument may hold
comes from the installed vLLM's source (`dapo.config.facts.vllm_source`); what that leaves open is left to vLLM.
"""

import builtins
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dapo.config.facts.vllm_source import Allowed, Section, allowed, engine_arguments, load_formats
from dapo.config.fields import TYPES
from dapo.config.names import ENGINE, JUDGE, nearest
from dapo.config.rules.model import engine_window
from dapo.config.schema import Config

SWITCHES = "0 1 f false n no off on t true y yes".split()  # texts that pydantic reads as such
BACKEND = "distributed_executor_backend"
SECRET = "hf_token"  # of which nothing is told
SPOKEN = re.compile(r"auto|\d+(\.\d+)?[kKmMgGtT]|\{.*\}")  # a number, or a section
BOUNDS = {"gt": "greater than", "ge": "at least", "lt": "below", "le": "at most"}
# Tokens of one pass where nobody says how many: vLLM's for an engine that another program embeds, and ours on a CPU.
MAX_NUM_BATCHED_TOKENS, CPU_BATCHED_TOKENS = 2048, 8192


def arguments(
    section: str, given: Mapping[str, Any], own: Mapping[str, str], *, elsewhere: str = "", spoken: bool = False
) -> Iterator[str]:
    """Reports arguments that dapo sets itself, those that there are not, and values that no engine takes. own: what to
    use in place of the former. elsewhere: an argument whose value is looked at by others. spoken: as for `values`."""
    for name, instead in own.items():
        if name in given:
            yield f"`{section}.{name}` is set by dapo itself; remove it and use {instead}"
    others = {name: one for name, one in given.items() if name not in own}
    known = engine_arguments() if others else frozenset()
    for name in sorted(others.keys() - known) if known else ():
        yield f"`{section}.{name}` is no engine argument of the installed vLLM; {nearest(name, known)}".rstrip("; ")
    others.pop(elsewhere, None)
    yield from values(section, others, spoken=spoken)


def values(section: str, given: Mapping[str, Any], *, spoken: bool = False) -> Iterator[str]:
    """Reports each value that no engine takes. section: the key that the arguments stand under. spoken: they go over a
    command line, whose parser reads numbers with units, texts, and lists of one."""
    for name, value in given.items():
        may = allowed(name)
        if name != SECRET and not (spoken and _is_read(value, may)):
            yield from _value(f"{section}.{name}", value, may)


def _is_read(value: Any, may: Allowed) -> bool:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return False
    return bool(may.types & {"str", "list"}) or (isinstance(value, str) and SPOKEN.fullmatch(value) is not None)


def _value(key: str, value: Any, may: Allowed) -> Iterator[str]:
    if value is None or not (may.types or may.choices or may.sections):
        return
    if isinstance(value, Mapping) and may.sections and "dict" not in may.types:
        yield from _section(key, value, may.sections[0])
    elif not any(_is(value, kind) for kind in may.types) and not any(_same(value, one) for one in may.choices):
        near = nearest(value, [one for one in may.choices if isinstance(one, str)]) if isinstance(value, str) else ""
        yield f"`{key}` ({value}) must be {_words(may)}; {near}".rstrip("; ")
    elif isinstance(value, int | float):
        broken = [limit for limit in may.bounds if not getattr(operator, limit[0])(value, limit[1])]
        for bound, number in broken[:1]:  # nan breaks all of them
            yield f"`{key}` ({value}) must be {BOUNDS[bound]} {number:g}"


def _section(key: str, given: Mapping[str, Any], section: Section) -> Iterator[str]:
    for name, value in given.items():
        known = str(name).replace("-", "_")  # as vLLM reads those of speculation
        if known in section.fields:
            yield from _value(f"{key}.{name}", value, section.fields[known])
        elif section.closed:
            near = nearest(known, section.fields)
            yield f"`{key}.{name}` is no field of the installed vLLM's {section.name}; {near}".rstrip("; ")


def _is(value: Any, kind: str) -> bool:
    """Returns whether pydantic, which checks vLLM's configuration, makes a value of the type `kind` of it."""
    if kind in ("int", "float"):
        return _is_number(value, whole=kind == "int")
    if kind == "bool":
        return isinstance(value, bool) or value in (0, 1) or (isinstance(value, str) and value.lower() in SWITCHES)
    if kind == "dict":
        return isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{"))
    return isinstance(value, str if kind == "str" else list)


def _is_number(value: Any, *, whole: bool) -> bool:
    try:
        number = float(value) if isinstance(value, str | int | float) else None
    except ValueError:
        return False
    return number is not None and (number.is_integer() or not whole)


def _same(value: Any, choice: Any) -> bool:
    """Returns whether a value may be read as a choice: some are, in capitals or with dashes."""
    return value == choice or str(value).lower().replace("-", "_") == str(choice).lower().replace("-", "_")


def _words(may: Allowed) -> str:
    kinds = [TYPES[getattr(builtins, kind)] for kind in sorted(may.types)]
    kinds += [TYPES[dict]] if may.sections and "dict" not in may.types else []
    return " or ".join(kinds + ([f"one of {', '.join(map(str, may.choices))}"] if may.choices else []))


def starts(cfg: Config) -> Iterator[str]:
    """Reports weights that no loader of vLLM reads, and processes that dapo does not start."""
    args, formats = cfg.rollout.vllm, load_formats()
    form = args.get("load_format", "auto")
    if formats and form not in formats:
        near = nearest(str(form), formats)
        yield f"`{ENGINE}.load_format` ({form}) must be one of {', '.join(formats)}; {near}".rstrip("; ")
    one = args.get("tensor_parallel_size", 1) == args.get("pipeline_parallel_size", 1) == 1
    if (backend := args.get(BACKEND, "mp")) not in (("mp", "uni") if one else ("mp",)):
        yield (
            f"`{ENGINE}.{BACKEND}` ({backend}) must be mp{' or uni' if one else ''}: an engine starts its processes "
            "itself, on the GPUs of one node; leave it out"
        )


def random_weights(cfg: Config) -> Iterator[str]:
    """Refuses weights that are to be replaced, where nothing replaces them."""
    if cfg.rollout.vllm.get("load_format") == "dummy":
        yield (
            f"`{ENGINE}.load_format` (dummy) gives engines random weights, and without actors they get no others; "
            "leave it out"
        )


def stages(cfg: Config, device: str) -> Iterator[str]:
    """Refuses pipeline stages where no pass is compiled first: vLLM's CPU engine makes their buffers in that alone."""
    name, own = "pipeline_parallel_size", cfg.reward.judge.engine
    for key, args in {ENGINE: cfg.rollout.vllm, **({JUDGE: own.vllm} if own.path else {})}.items():
        count = args.get(name, 1)
        if device == "cpu" and args.get("enforce_eager", True) and isinstance(count, int) and count > 1:
            yield (
                f"`{key}.{name}` ({count}) must be 1 on a CPU, where vLLM's engine dies at its first pass over "
                f"several stages; use `{key}.tensor_parallel_size`"
            )


def batches(cfg: Config, device: str) -> Iterator[str]:
    """Reports passes of an engine that hold fewer tokens than vLLM demands, and bounds beyond what they bound. device:
    cpu, cuda, or auto where it is not known yet."""
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
