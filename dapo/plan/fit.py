"""Says what cannot fit, and which keys would change that, with the numbers needed: a configuration in, messages out."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from dapo.config.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.plan.actor import ActorMemory, device_of
from dapo.plan.engine import EngineMemory
from dapo.plan.terms import size

MOST_TIMES_RANKS = 8
HIGHEST_UTILIZATION = 0.95
ROUND_TOKENS = 256
WIDEST_ENGINE = 16  # GPUs
Change = dict[str, Any]


def problems(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    """Returns one message per thing that does not fit; empty when everything does."""
    engine = EngineMemory(cfg, shape)
    uneven = list(_uneven(cfg, shape, engine))
    return uneven or [*_actors(cfg, shape), *_engines(cfg, shape, engine), *_machine(cfg, shape, engine)]


def room_for_actors(cfg: PlannedConfig, shape: ModelShape) -> float:
    """Returns the bytes of one device that an actor rank may take."""
    memory = float(cfg.plan.gpu_memory_bytes)
    engine = EngineMemory(cfg, shape)
    return memory * (1 - engine.utilization) if cfg.trainer.colocate and device_of(cfg) == "cuda" else memory


def _uneven(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[str]:
    if engine.tensor_parallel not in shape.head_shares:
        yield (
            f"`rollout.vllm.tensor_parallel_size` ({engine.tensor_parallel}) must divide the {shape.num_heads} "
            f"attention heads of `model.path` ({cfg.model.path}), and divide its {shape.num_kv_heads} key-value heads "
            f"or be a multiple of them; it can be {', '.join(map(str, shape.head_shares))}"
        )


def _actors(cfg: PlannedConfig, shape: ModelShape) -> Iterator[str]:
    """Reports an actor rank beyond its device."""
    peak, room = ActorMemory(cfg, shape).peak(), room_for_actors(cfg, shape)
    if peak.total > room:
        beside = f", of which the engine takes {EngineMemory(cfg, shape).utilization:g}" if cfg.trainer.colocate else ""
        yield (
            f"an actor rank needs {size(peak.total)} ({peak.name}), and has {size(room)} (`plan.gpu_memory_bytes` "
            f"{size(cfg.plan.gpu_memory_bytes)}{beside}); {_remedy(cfg, shape)}"
        )
    host = sum(term.amount for term in ActorMemory(cfg, shape).offloaded())
    ranks = min(cfg.plan.gpus_per_node, cfg.actor.num_workers)
    if host * ranks > cfg.plan.host_memory_bytes:
        yield (
            f"{ranks} ranks of a node offload {size(host * ranks)} to host memory, and `plan.host_memory_bytes` is "
            f"{size(cfg.plan.host_memory_bytes)}; shard over more ranks (`actor.num_workers`, `actor.fsdp_size`), or "
            "set actor.offload=false"
        )


def _remedy(cfg: PlannedConfig, shape: ModelShape) -> str:
    """Names single changes that make a rank fit, or else the first few of them together that do."""
    alone = [change for change in _changes(cfg, shape) if _rank_fits(changed(cfg, change), shape)]
    if alone:
        return "any of these makes it fit: " + "; ".join(_words(cfg, shape, change) for change in alone)
    together: Change = {}
    for change in _changes(cfg, shape):
        together |= change
        if _rank_fits(changed(cfg, together), shape):
            return f"these together make it fit: {_words(cfg, shape, together)}"
    need = ActorMemory(changed(cfg, together), shape).peak().total
    return f"no change of parallelism, recomputation and offload is enough (still {size(need)}): take a smaller model"


def _words(cfg: PlannedConfig, shape: ModelShape, change: Change) -> str:
    need = ActorMemory(changed(cfg, change), shape).peak().total
    return f"{' '.join(f'{key}={str(value).lower()}' for key, value in change.items())} ({size(need)})"


def _rank_fits(cfg: PlannedConfig, shape: ModelShape) -> bool:
    return ActorMemory(cfg, shape).peak().total <= room_for_actors(cfg, shape)


def _changes(cfg: PlannedConfig, shape: ModelShape) -> Iterator[Change]:
    """Yields what makes a rank smaller, the cheap changes first; of numbers the least that is enough, or the most there
    is."""
    actor = cfg.actor
    if not actor.reshard_after_forward:
        yield {"actor.reshard_after_forward": True}
    if cfg.model.gradient_checkpointing == "none":
        yield {"model.gradient_checkpointing": "selective"}
    if cfg.model.gradient_checkpointing != "full":
        yield {"model.gradient_checkpointing": "full"}
    if actor.fsdp_size not in (-1, actor.num_workers):
        yield {"actor.fsdp_size": -1}
    if cfg.trainer.colocate:
        share = 1 - ActorMemory(cfg, shape).peak().total / cfg.plan.gpu_memory_bytes
        if share > 0:
            yield {"rollout.vllm.gpu_memory_utilization": int(share * 100) / 100}
    window = cfg.data.max_prompt_length + cfg.data.max_response_length
    yield from _fewer_tokens(cfg, shape, -(-window // actor.ulysses_sequence_parallel_size))
    shared = [n for n in _sharing(cfg, shape) if n > actor.ulysses_sequence_parallel_size]
    options: list[Change] = [
        {"actor.ulysses_sequence_parallel_size": n, "actor.max_tokens_per_gpu": -(-window // n)} for n in shared
    ]
    yield from _least(cfg, shape, options)
    if not actor.offload and device_of(cfg) == "cuda":
        yield {"actor.offload": True}
    ranks = actor.num_workers
    more: list[Change] = []
    while (
        (ranks := ranks * 2) <= MOST_TIMES_RANKS * actor.num_workers
        and actor.fsdp_size == -1
        and not cfg.trainer.colocate
    ):
        more.append({"actor.num_workers": ranks})
    yield from _least(cfg, shape, more)


def _least(cfg: PlannedConfig, shape: ModelShape, options: list[Change]) -> Iterator[Change]:
    """Yields the first option that is enough; the last when none is."""
    found = next((option for option in options if _rank_fits(changed(cfg, option), shape)), None)
    if options:
        yield found or options[-1]


def _fewer_tokens(cfg: PlannedConfig, shape: ModelShape, least: int) -> Iterator[Change]:
    """Yields the most tokens that fit, in steps; a sequence must find room."""
    tokens = cfg.actor.max_tokens_per_gpu
    steps = range(tokens // ROUND_TOKENS * ROUND_TOKENS, least, -ROUND_TOKENS)
    fitting = (n for n in steps if _rank_fits(changed(cfg, {"actor.max_tokens_per_gpu": n}), shape))
    if tokens > least:
        yield {"actor.max_tokens_per_gpu": next(fitting, least)}


def _sharing(cfg: PlannedConfig, shape: ModelShape) -> list[int]:
    """Lists the sizes of sequence parallelism that ranks and heads allow."""
    return [n for n in shape.head_shares if cfg.actor.num_workers % n == 0]


def changed(cfg: PlannedConfig, change: Change) -> PlannedConfig:
    """Returns a copy with other values under dotted keys."""
    copied = copy.deepcopy(cfg)
    for key, value in change.items():
        *path, last = key.split(".")
        section: Any = copied
        for name in path:
            section = section[name] if isinstance(section, dict) else getattr(section, name)
        if isinstance(section, dict):
            section[last] = value
        else:
            setattr(section, last, value)
    return copied


def _engines(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[str]:
    """Reports engines that vLLM would not start: a longest sequence finds no room, or weights arrive beyond the
    share.
    """
    memory, share, beyond = cfg.plan.gpu_memory_bytes, engine.utilization, engine.beyond()
    if device_of(cfg) == "cuda" and share * memory + beyond.amount > memory:
        yield (
            f"`rollout.vllm.gpu_memory_utilization` ({share:g}) leaves {size((1 - share) * memory)} of a GPU, and a "
            f"weight sync needs {size(beyond.amount)} there ({beyond.formula}); set it to at most "
            f"{int((1 - beyond.amount / memory) * 100) / 100:g}, or lower `weight_sync.bucket_bytes`"
        )
    if engine.at_full_length >= 1:
        return
    *used, cache = engine.terms()
    fixed = sum(term.amount for term in used)
    needed = -(-engine.window // engine.block) * engine.block * engine.kv_bytes_per_token
    remedies = []
    share = (fixed + needed) / cfg.plan.gpu_memory_bytes
    if device_of(cfg) == "cuda" and share <= HIGHEST_UTILIZATION and not cfg.trainer.colocate:
        remedies.append(f"rollout.vllm.gpu_memory_utilization={-int(-share * 100 // 1) / 100:g}")
    if not cfg.trainer.colocate:
        wider = [n for n in shape.head_shares if engine.tensor_parallel < n <= WIDEST_ENGINE]
        key = "rollout.vllm.tensor_parallel_size"
        fitting = (n for n in wider if EngineMemory(changed(cfg, {key: n}), shape).at_full_length >= 1)
        remedies += [f"{key}={n}" for n in islice(fitting, 1)]
    if engine.kv_tokens > cfg.data.max_prompt_length:
        remedies.append(f"data.max_response_length={engine.kv_tokens - cfg.data.max_prompt_length}")
    remedy = f"any of these makes it fit: {'; '.join(remedies)}" if remedies else "take larger GPUs or a smaller model"
    yield (
        f"an engine needs {size(needed)} of KV cache per GPU for one sequence of {engine.window:,} tokens, and "
        f"{size(cache.amount)} are left ({cache.formula}, {size(fixed)}); {remedy}"
    )


def _machine(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[str]:
    """Reports a machine without GPUs whose memory, shared by all processes, is too small."""
    if device_of(cfg) == "cuda":
        return
    ranks = cfg.actor.num_workers * ActorMemory(cfg, shape).peak().total
    engines = cfg.rollout.num_engines * sum(term.amount for term in engine.terms())
    if ranks + engines > cfg.plan.gpu_memory_bytes:
        yield (
            f"{cfg.actor.num_workers} ranks ({size(ranks)}) and {cfg.rollout.num_engines} engines ({size(engines)}) "
            f"need {size(ranks + engines)} of the machine's memory, and `plan.gpu_memory_bytes` is "
            f"{size(cfg.plan.gpu_memory_bytes)}; lower actor.num_workers, rollout.num_engines or "
            "rollout.vllm.kv_cache_memory_bytes"
        )
