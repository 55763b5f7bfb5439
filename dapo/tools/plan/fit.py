"""Reports what cannot fit in memory, with the keys that would change that and the values needed, and settings that
divide badly."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from dapo.config.derived import device_of, lends, lent_engines, num_shards, shares_gpus
from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.engine import CACHE, EngineMemory
from dapo.tools.plan.step import Step, mean_tokens
from dapo.tools.plan.terms import size, together

HIGHEST_UTILIZATION = 0.95
WIDEST_ENGINE = 16  # GPUs
GRAPH_SEQUENCES = 512  # vLLM 0.32: default size of the largest captured batch
LOW_FILL, LOW_BALANCE, MANY_IDLE, SLOW_NETWORK = 0.6, 0.9, 0.05, 0.05
Change = dict[str, Any]


def problems(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    engine = EngineMemory(cfg, shape)
    found = [*_actors(cfg, shape), *_engines(cfg, shape, engine), *_machine(cfg, shape, engine)]
    return [*found, *_caches(cfg, shape, engine, len(found))]


def room_for_actors(cfg: PlannedConfig, shape: ModelShape) -> float:
    memory = float(cfg.plan.gpu_memory_bytes)
    if device_of(cfg) == "cpu" or not shares_gpus(cfg):
        return memory
    return memory - EngineMemory(cfg, shape).asleep().amount


def _actors(cfg: PlannedConfig, shape: ModelShape) -> Iterator[str]:
    peak, room = ActorMemory(cfg, shape).peak(), room_for_actors(cfg, shape)
    if peak.total > room:
        asleep = size(EngineMemory(cfg, shape).asleep().amount)
        beside = f", of which the engine keeps {asleep} when it sleeps" if shares_gpus(cfg) else ""
        yield (
            f"an actor rank needs {size(peak.total)} ({peak.name}), and has {size(room)} (`plan.gpu_memory_bytes` "
            f"{size(cfg.plan.gpu_memory_bytes)}{beside}); {_remedy(cfg, shape)}"
        )
    host = ActorMemory(cfg, shape).on_host()
    if device_of(cfg) == "cuda" and host > cfg.plan.host_memory_bytes:
        ranks = min(cfg.plan.gpus_per_node, cfg.actor.num_workers)
        copy = (
            (" and copy for checkpoints", "checkpoint.async_save=false or ") if cfg.checkpoint.async_save else ("", "")
        )
        yield (
            f"{ranks} ranks of a node offload{copy[0]} {size(host)} to host memory, and `plan.host_memory_bytes` is "
            f"{size(cfg.plan.host_memory_bytes)}; shard over more ranks (`actor.num_workers`, `actor.fsdp_size`), or "
            f"set {copy[1]}actor.offload=none"
        )


def _remedy(cfg: PlannedConfig, shape: ModelShape) -> str:
    """Names the single changes that make a rank fit; if there are none, the three that save most."""
    now = ActorMemory(cfg, shape).peak().total
    strongest: dict[str, tuple[float, str]] = {}

    def need(change: Change, other: PlannedConfig) -> tuple[bool, str]:
        total = ActorMemory(other, shape).peak().total
        words = f"{_words(change)} ({size(total)})"
        if total < strongest.get(key := next(iter(change)), (now, ""))[0]:
            strongest[key] = (total, words)
        return total <= room_for_actors(other, shape), words

    if fitting := _fitting(cfg, _changes(cfg, shape), need):
        return fitting
    listed = "; ".join(words for _, words in sorted(strongest.values())[:3])
    combine = f"combine what saves most ({listed}), or " if listed else ""
    return f"no single change of parallelism, recomputation and offload is enough: {combine}take a smaller model"


def _fitting(
    cfg: PlannedConfig, changes: Iterator[Change], look: Callable[[Change, PlannedConfig], tuple[bool, str]]
) -> str:
    """Names the first value of each key that is enough; empty if none is. look: whether it is, and its words."""
    found: dict[str, str] = {}
    for change in changes:
        enough, words = look(change, changed(cfg, change))
        if enough:
            found.setdefault(next(iter(change)), words)
    return f"any of these makes it fit: {'; '.join(found.values())}" if found else ""


def _words(change: Change) -> str:
    return " ".join(f"{key}={str(value).lower()}" for key, value in change.items())


def _changes(cfg: PlannedConfig, shape: ModelShape) -> Iterator[Change]:
    """Yields changes that reduce a rank's memory, cheap ones first, and the values of a key from mild to strong."""
    actor, shared = cfg.actor, cfg.actor.ulysses_sequence_parallel_size
    window = cfg.data.max_prompt_length + cfg.data.max_response_length
    yield {"actor.reshard_after_forward": True}
    yield {"model.gradient_checkpointing": "selective"}
    yield {"model.gradient_checkpointing": "full"}
    yield {"actor.fsdp_size": -1}
    for part in (0.75, 0.5, 0.25, 0):
        yield {"actor.max_tokens_per_gpu": max(int(part * actor.max_tokens_per_gpu), -(-window // shared))}
    for n in shape.head_shares:
        if n > shared and actor.num_workers % n == 0:
            yield {"actor.ulysses_sequence_parallel_size": n, "actor.max_tokens_per_gpu": -(-window // n)}
    if device_of(cfg) == "cuda":
        yield {"actor.offload": "host"}
    if actor.fsdp_size == -1 and not shares_gpus(cfg):
        yield from ({"actor.num_workers": times * actor.num_workers} for times in (2, 4, 8))


def changed(cfg: PlannedConfig, change: Change) -> PlannedConfig:
    copied = copy.deepcopy(cfg)
    for key, value in change.items():
        *sections, name = key.split(".")
        section: Any = copied
        for each in sections:
            section = getattr(section, each)
        if isinstance(section, dict):
            section[name] = value
        else:
            setattr(section, name, value)
    return copied


def _engines(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[str]:
    """Reports engines that do not leave room for a weight sync, or for the ranks when they wake."""
    memory, beyond = cfg.plan.gpu_memory_bytes, together(engine.beyond())
    if device_of(cfg) == "cuda" and beyond and engine.taken + beyond > memory:
        why = " and ".join(f"{term.name}, {term.formula}" for term in engine.beyond())
        leaves, most = _left_by(engine, beyond)
        yield (
            f"{leaves}, and a weight sync needs {size(beyond)} there ({why}); {most}, or lower "
            "`weight_sync.bucket_bytes`"
        )
    if shares_gpus(cfg) and device_of(cfg) == "cuda":
        yield from _turn_of_engines(cfg, shape, engine)


def _caches(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory, others: int) -> Iterator[str]:
    """Reports a KV cache too small for one longest sequence: vLLM would not start. others: number of other problems."""
    if engine.at_full_length >= 1:
        return
    *used, cache = engine.terms()
    fixed = together(used)
    needed = -(-engine.window // engine.block) * engine.block * engine.kv_bytes_per_token

    def enough(change: Change, other: PlannedConfig) -> tuple[bool, str]:
        wide = EngineMemory(other, shape).at_full_length >= 1
        return wide and len(problems(other, shape)) <= others, _words(change)

    changes = _wider_caches(cfg, shape, engine, fixed, needed)
    remedy = _fitting(cfg, changes, enough) or "take larger GPUs or a smaller model"
    yield (
        f"an engine needs {size(needed)} of KV cache per GPU for one sequence of {engine.window:,} tokens, and "
        f"{size(cache.amount)} are left ({cache.formula}, {size(fixed)}); {remedy}"
    )


def _wider_caches(
    cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory, fixed: float, needed: int
) -> Iterator[Change]:
    """Yields changes that enlarge an engine's cache or shorten sequences. fixed: the engine's bytes without cache."""
    share, key = (fixed + needed) / cfg.plan.gpu_memory_bytes, engine.within(0)[0]
    if key.endswith(CACHE):
        yield {key: needed}
    elif device_of(cfg) == "cuda" and share <= HIGHEST_UTILIZATION:
        yield {key: -int(-share * 100 // 1) / 100}
    for n in shape.head_shares:
        gpus = engine.gpus // engine.tensor_parallel * n
        wider: Change = {"rollout.vllm.tensor_parallel_size": n}
        if engine.tensor_parallel < n <= WIDEST_ENGINE and cfg.trainer.colocate == "none":
            yield wider
        elif engine.tensor_parallel < n <= WIDEST_ENGINE and shares_gpus(cfg) and cfg.actor.num_workers % gpus == 0:
            yield wider if lends(cfg) else wider | {"rollout.num_engines": cfg.actor.num_workers // gpus}
    if engine.kv_tokens > cfg.data.max_prompt_length:
        yield {"data.max_response_length": engine.kv_tokens - cfg.data.max_prompt_length}


def _left_by(engine: EngineMemory, needed: float) -> tuple[str, str]:
    """Returns what an engine leaves free of a GPU, and the setting that leaves enough, as text."""
    memory = engine.cfg.plan.gpu_memory_bytes
    (key, given), (_, most) = engine.within(engine.taken), engine.within(memory - needed)
    number = "{:g}" if isinstance(most, float) else "{:,}"
    left = size(max(0.0, memory - engine.taken))
    return f"`{key}` ({number.format(given)}) leaves {left} of a GPU", f"set it to at most {most}"


def _turn_of_engines(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[str]:
    beside = ActorMemory(cfg, shape).beside()
    if engine.taken + beside.total > cfg.plan.gpu_memory_bytes:
        leaves, most = _left_by(engine, beside.total)
        offload = "" if cfg.actor.offload != "none" else ", or set actor.offload=phase"
        yield (
            f"{leaves}, and an actor rank needs {size(beside.total)} there while the engine has it ({beside.name}); "
            f"{most}{offload}"
        )


def _machine(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[str]:
    """Reports a machine without GPUs whose memory, shared by all processes, is too small."""
    if device_of(cfg) == "cuda":
        return
    actor = ActorMemory(cfg, shape)
    own, *alone = [term.amount for term in actor.copied()] or [0.0]
    ranks = cfg.actor.num_workers * (actor.peak().total + own) + sum(alone)
    count = cfg.rollout.num_engines + lent_engines(cfg)
    engines = count * together(engine.terms())
    if ranks + engines > cfg.plan.gpu_memory_bytes:
        yield (
            f"{cfg.actor.num_workers} ranks ({size(ranks)}) and {count} engines ({size(engines)}) "
            f"need {size(ranks + engines)} of the machine's memory, and `plan.gpu_memory_bytes` is "
            f"{size(cfg.plan.gpu_memory_bytes)}; lower actor.num_workers, rollout.num_engines or "
            "rollout.vllm.kv_cache_memory_bytes"
        )


def hints(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    """Settings that divide badly and leave ranks, engines or memory idle."""
    step, engine = Step(cfg, shape), EngineMemory(cfg, shape)
    return [
        *_idle_ranks(cfg, step),
        *_uneven_shards(cfg, shape, engine),
        *_copied_heads(cfg, shape, engine),
        *_idle_engines(cfg, step, engine),
    ]


def _idle_ranks(cfg: PlannedConfig, step: Step) -> Iterator[str]:
    sequences, packing = cfg.actor.ppo_mini_batch_size * cfg.rollout.n, step.packing
    if sequences % step.rank_groups:
        yield (
            f"{sequences} sequences per mini-batch (`actor.ppo_mini_batch_size` {cfg.actor.ppo_mini_batch_size} x "
            f"`rollout.n` {cfg.rollout.n}) over {step.rank_groups} groups of ranks (`actor.num_workers` / "
            "`actor.ulysses_sequence_parallel_size`) do not divide"
        )
    if packing.idle >= MANY_IDLE:
        yield (
            f"{packing.idle:.0%} of the micro-batches are empty: fewer groups of ranks (a larger "
            "`actor.ulysses_sequence_parallel_size`) or a larger `actor.ppo_mini_batch_size` would use them"
        )
    if packing.balance < LOW_BALANCE:
        yield (
            f"ranks wait for the heaviest {1 - packing.balance:.0%} of the time: few sequences of uneven lengths per "
            "micro-batch; a larger `actor.max_tokens_per_gpu`, `actor.ulysses_sequence_parallel_size` or "
            "`actor.ppo_mini_batch_size` evens them out"
        )
    waiting = sum(max(0.0, wire - computing) for computing, wire in step.passes.values())
    if device_of(cfg) == "cuda" and waiting > SLOW_NETWORK * step.update_s:
        yield (
            f"the update waits for the network {waiting / step.update_s:.0%} of the time: parameters are gathered and "
            f"gradients summed in each of {step.packing.micro_batches} micro-batches of an optimizer step; a larger "
            "`actor.max_tokens_per_gpu` makes them fewer, a smaller `actor.fsdp_size` keeps them within a node"
        )
    if packing.filled < LOW_FILL:
        yield (
            f"micro-batches are {packing.filled:.0%} full: activations are reserved for more; a smaller "
            "`actor.max_tokens_per_gpu` (at least the longest sequence over the sequence-parallel size), or a larger "
            "`actor.ppo_mini_batch_size`"
        )


def _uneven_shards(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[str]:
    shards = num_shards(cfg)
    rows = {
        "hidden size": shape.hidden_size,
        "experts" if shape.experts else "intermediate size": shape.experts or shape.intermediate_size,
        "key-value width": shape.kv_size,
        "vocabulary": shape.vocab_size,
    }
    uneven = [f"{name} {count:,}" for name, count in rows.items() if count % shards]
    if uneven:
        yield f"parameters are padded in {shards} shards (`actor.fsdp_size`), which divides not: {', '.join(uneven)}"
    node = cfg.plan.gpus_per_node
    if cfg.actor.num_workers > node and cfg.actor.num_workers % node:
        yield f"`actor.num_workers` ({cfg.actor.num_workers}) leaves a node of {node} GPUs partly used"
    if node % engine.gpus and engine.gpus % node:
        yield f"engines of {engine.gpus} GPUs leave some of a node's {node} unused or lie across nodes"


def _copied_heads(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[str]:
    shared, keys = cfg.actor.ulysses_sequence_parallel_size, shape.num_kv_heads
    if shared > keys:
        yield f"`actor.ulysses_sequence_parallel_size` ({shared}) exceeds the {keys} key-value heads: they are copied"
    if engine.tensor_parallel > keys:
        yield (
            f"`rollout.vllm.tensor_parallel_size` ({engine.tensor_parallel}) exceeds the {keys} key-value heads: the "
            "KV cache holds copies"
        )


def _idle_engines(cfg: PlannedConfig, step: Step, engine: EngineMemory) -> Iterator[str]:
    prompt, _ = mean_tokens(cfg)
    holds, running = engine.at_lengths(prompt, step.responses), engine.running(prompt, step.responses)
    wanted = step.sequences / step.kept_rate
    key, admitted = engine.admitted
    useful = min(holds, wanted / cfg.rollout.num_engines, engine.max_num_batched_tokens)
    if useful > 1.25 * admitted:
        yield (
            f"an engine's cache holds {holds:.0f} sequences, a step has {wanted / cfg.rollout.num_engines:.0f} for it, "
            f"and it runs {admitted}: rollout.vllm.{key}={int(useful) // 8 * 8} would use it"
        )
    if engine.at_full_length < cfg.rollout.n:
        yield (
            f"a group of `rollout.n` ({cfg.rollout.n}) at full length does not run at once in one engine, which holds "
            f"{engine.at_full_length:.1f} such sequences: late in a group requests are put off and computed again"
        )
    if device_of(cfg) == "cuda" and admitted > GRAPH_SEQUENCES and not _captures_more(cfg, admitted):
        yield (
            f"an engine runs {admitted} sequences at once (`rollout.vllm.{key}`), and vLLM's CUDA graphs end at "
            f"{GRAPH_SEQUENCES}: fuller steps are launched kernel by kernel; "
            f"'rollout.vllm.compilation_config={{max_cudagraph_capture_size: {admitted}}}' captures them too"
        )
    slots = cfg.rollout.num_engines * running
    if wanted < slots:
        yield f"{wanted:.0f} responses per step do not fill the {slots} places of `rollout.num_engines` engines"


def _captures_more(cfg: PlannedConfig, sequences: int) -> bool:
    """Whether the engine arguments set larger CUDA graphs, or disable them."""
    given = cfg.rollout.vllm.get("compilation_config") or {}
    own = isinstance(given, dict) and given.get("max_cudagraph_capture_size")
    return bool(cfg.rollout.vllm.get("enforce_eager")) or (not isinstance(given, dict)) or int(own or 0) >= sequences
