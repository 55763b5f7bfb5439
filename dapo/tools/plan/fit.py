"""Says what does not fit in memory and which single changes would be enough, and which settings leave GPUs idle."""

import copy
from collections.abc import Iterator
from typing import Any

from dapo.config.derived import device_of, lends, lent_engines, num_shards, shares_gpus
from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.engine import EngineMemory
from dapo.tools.plan.operations import attention_of
from dapo.tools.plan.step import Step, mean_tokens
from dapo.tools.plan.terms import size, together

HIGHEST_UTILIZATION = 95  # percent of a GPU
WIDEST_ENGINE = 16  # GPUs
LOW_FILL, LOW_BALANCE = 0.6, 0.9
UTILIZATION, CACHE = "rollout.vllm.gpu_memory_utilization", "rollout.vllm.kv_cache_memory_bytes"
OTHER_LOSS = "algorithm.rollout_correction.use_rollout_logprobs"
Change = dict[str, Any]


def problems(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    found = dict(_lacks(cfg, shape))
    return [f"{text}; {_remedy(cfg, shape, what, found)}" for what, text in found.items()]


def room_for_actors(cfg: PlannedConfig, shape: ModelShape) -> float:
    memory = float(cfg.plan.gpu_memory_bytes)
    if device_of(cfg) == "cpu" or not shares_gpus(cfg):
        return memory
    engine = EngineMemory(cfg, shape)
    return memory - engine.sharing * engine.asleep().amount


def _lacks(cfg: PlannedConfig, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yields what has too little memory, by name, and a sentence with the bytes."""
    actor, engine, plan = ActorMemory(cfg, shape), EngineMemory(cfg, shape), cfg.plan
    peak, room, memory = actor.peak(), room_for_actors(cfg, shape), plan.gpu_memory_bytes
    if peak.total > room:
        yield "rank", f"an actor rank needs {size(peak.total)} ({peak.name}), and has {size(room)}"
    if device_of(cfg) == "cpu":
        count = cfg.rollout.num_engines + lent_engines(cfg)
        needed = cfg.actor.num_workers * peak.total + count * together(engine.terms())
        if needed > memory:
            yield "machine", f"all ranks and engines need {size(needed)}, and the machine has {size(memory)}"
    else:
        host = actor.on_host()
        if host > plan.host_memory_bytes:
            yield (
                "host",
                f"the ranks of a node keep {size(host)} in host memory, and `plan.host_memory_bytes` is "
                f"{size(plan.host_memory_bytes)}",
            )
        left, beyond = memory - engine.sharing * engine.taken, together(engine.beyond())
        if beyond and beyond > left:
            yield "sync", f"an engine leaves {size(left)} of a GPU, and a weight sync needs {size(beyond)} there"
        if shares_gpus(cfg) and (beside := actor.beside()).total > left:
            yield (
                "turn",
                f"{'an engine leaves' if engine.sharing == 1 else f'{engine.sharing} engines leave'} {size(left)} of a "
                f"GPU, and an actor rank needs {size(beside.total)} there meanwhile ({beside.name})",
            )
    if engine.at_full_length < 1:
        *used, cache = engine.terms()
        yield (
            "cache",
            f"an engine needs {size(engine.sequence_bytes)} of KV cache per GPU for one sequence of "
            f"{engine.window:,} tokens, and {size(cache.amount)} are left ({cache.formula}, {size(together(used))})",
        )


def _remedy(cfg: PlannedConfig, shape: ModelShape, what: str, found: dict[str, str]) -> str:
    """Names the first value of each key that ends one lack and adds none; if there is none, all that save memory."""
    enough, saves = dict[str, str](), dict[str, float]()
    now = ActorMemory(cfg, shape).peak().total
    for change in _changes(cfg, shape):
        key = next(iter(change))
        if key in enough:
            continue
        other = changed(cfg, change)
        total, left = ActorMemory(other, shape).peak().total, dict(_lacks(other, shape))
        if what not in left and left.keys() <= found.keys():
            enough[key] = words(change)
        elif total < now:
            saves[f"{words(change)} ({size(total)})"] = total
    if enough:
        return f"any of these makes it fit: {'; '.join(enough.values())}"
    best = f"combine what saves most ({'; '.join(sorted(saves, key=saves.__getitem__)[:3])}), or " if saves else ""
    return f"no single change is enough: {best}take a smaller model or larger GPUs"


def _changes(cfg: PlannedConfig, shape: ModelShape) -> Iterator[Change]:
    """Yields changes that reduce memory, cheap ones first, and the values of a key from mild to strong."""
    actor, engine, shared = cfg.actor, EngineMemory(cfg, shape), cfg.actor.ulysses_sequence_parallel_size
    yield {"actor.reshard_after_forward": True}
    yield {"model.gradient_checkpointing": "selective"}
    yield {"model.gradient_checkpointing": "full"}
    yield {"actor.fsdp_size": -1}
    yield from ({"actor.max_tokens_per_gpu": tokens} for tokens in _fewer_tokens(cfg, shape))
    for n in shape.head_shares:
        if n > shared and actor.num_workers % n == 0:
            yield {"actor.ulysses_sequence_parallel_size": n, "actor.max_tokens_per_gpu": -(-engine.window // n)}
    if device_of(cfg) == "cuda":
        offloads = ["none", "phase", "host"] if shares_gpus(cfg) else ["none", "host"]
        yield from ({"actor.offload": value} for value in offloads if value != actor.offload)
    if cfg.checkpoint.async_save:
        yield {"checkpoint.async_save": False}
    if cfg.checkpoint.memory_copies:
        yield {"checkpoint.memory_copies": 0}
    if actor.fsdp_size == -1 and not shares_gpus(cfg):
        yield from ({"actor.num_workers": times * actor.num_workers} for times in (2, 4, 8))
    yield from _engine_changes(cfg, shape, engine)


def _engine_changes(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[Change]:
    if given := engine.cache_bytes:
        yield from ({CACHE: int(given * part / 10)} for part in range(9, 0, -1))
        yield {CACHE: engine.sequence_bytes}
    elif device_of(cfg) == "cuda":
        now = int(100 * engine.utilization)
        yield from ({UTILIZATION: percent / 100} for percent in range(now - 1, 0, -1))
        yield from ({UTILIZATION: percent / 100} for percent in range(now + 1, HIGHEST_UTILIZATION + 1))
    if engine.sharing > 1:
        yield {"rollout.engines_per_gpu": 1, "rollout.num_engines": cfg.actor.num_workers}
        return
    for n in shape.head_shares:
        gpus = engine.gpus // engine.tensor_parallel * n
        wider: Change = {"rollout.vllm.tensor_parallel_size": n}
        if engine.tensor_parallel < n <= WIDEST_ENGINE and cfg.trainer.colocate == "none":
            yield wider
        elif engine.tensor_parallel < n <= WIDEST_ENGINE and shares_gpus(cfg) and cfg.actor.num_workers % gpus == 0:
            yield wider if lends(cfg) else wider | {"rollout.num_engines": cfg.actor.num_workers // gpus}
    if engine.kv_tokens > cfg.data.max_prompt_length:
        yield {"data.max_response_length": engine.kv_tokens - cfg.data.max_prompt_length}


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


def words(change: Change) -> str:
    return " ".join(f"{name}={str(value).lower()}" for name, value in change.items())


def levers(cfg: PlannedConfig, shape: ModelShape) -> tuple[list[tuple[Change, Step, bool]], tuple[Change, Step]]:
    """Returns changes that make the update faster, each with the step that it makes and whether that fits, the fastest
    first; and those that fit together, taken in this order, with their step. No other loss is among these."""
    now, chosen = Step(cfg, shape), Change()
    tried = [(change, Step(changed(cfg, change), shape)) for change in _faster(cfg, shape)]
    found = [(change, step, _fits(step.cfg, shape)) for change, step in tried if step.update_s < now.update_s]
    found.sort(key=lambda each: each[1].update_s)
    for change in (change for change, _, fits in found if fits and OTHER_LOSS not in change):
        both = Step(changed(now.cfg, change), shape)
        if both.update_s < now.update_s and _fits(both.cfg, shape):
            now, chosen = both, chosen | change
    return found, (chosen, now)


def _fits(cfg: PlannedConfig, shape: ModelShape) -> bool:
    return not any(_lacks(cfg, shape))


def _faster(cfg: PlannedConfig, shape: ModelShape) -> Iterator[Change]:
    corrects = cfg.algorithm.rollout_correction.mode != "none" or cfg.algorithm.score_centering > 0
    if not cfg.actor.compile:
        yield {"actor.compile": True}
    if attention_of(cfg) != "fa3":
        yield {"model.attn_implementation": "fa3"}
    for mode in {"full": ("selective", "none"), "selective": ("none",), "none": ()}[cfg.model.gradient_checkpointing]:
        kept: Change = {"model.gradient_checkpointing": mode}
        yield kept
        smaller = (kept | {"actor.max_tokens_per_gpu": tokens} for tokens in _fewer_tokens(cfg, shape))
        if not _fits(changed(cfg, kept), shape):
            yield from [change for change in smaller if _fits(changed(cfg, change), shape)][:1]
    yield {"actor.max_tokens_per_gpu": 2 * cfg.actor.max_tokens_per_gpu}
    if cfg.actor.reshard_after_forward:
        yield {"actor.reshard_after_forward": False}
    if num_shards(cfg) > cfg.plan.gpus_per_node and cfg.actor.num_workers % cfg.plan.gpus_per_node == 0:
        yield {"actor.fsdp_size": cfg.plan.gpus_per_node}
    if cfg.actor.offload == "host":
        yield {"actor.offload": "none"}
    if "old log-probabilities" in Step(cfg, shape).extra_passes and not corrects:
        yield {OTHER_LOSS: True}


def _fewer_tokens(cfg: PlannedConfig, shape: ModelShape) -> list[int]:
    window, shared = EngineMemory(cfg, shape).window, cfg.actor.ulysses_sequence_parallel_size
    return [max(part * cfg.actor.max_tokens_per_gpu // 8, -(-window // shared)) for part in range(7, -1, -1)]


def hints(cfg: PlannedConfig, shape: ModelShape) -> Iterator[str]:
    """Yields settings that leave ranks, engines or memory idle."""
    step, engine = Step(cfg, shape), EngineMemory(cfg, shape)
    packing, prompt = step.packing, mean_tokens(cfg)[0]
    if packing.balance < LOW_BALANCE:
        yield (
            f"ranks wait for the heaviest {1 - packing.balance:.0%} of the time: a larger "
            "`actor.ulysses_sequence_parallel_size` or `actor.ppo_mini_batch_size` evens them out"
        )
    if packing.filled < LOW_FILL:
        yield f"micro-batches are {packing.filled:.0%} full: a smaller `actor.max_tokens_per_gpu` needs less memory"
    wanted = step.sequences / step.kept_rate / cfg.rollout.num_engines
    useful = int(min(engine.at_lengths(prompt, step.responses), wanted, engine.max_num_batched_tokens))
    if useful > 1.25 * engine.max_num_seqs:
        yield (
            f"an engine could run {useful} sequences, and runs {engine.max_num_seqs}: "
            f"rollout.vllm.max_num_seqs={useful // 8 * 8} would use it"
        )
    if wanted < (running := engine.running(prompt, step.responses)):
        yield f"a step has {wanted:.0f} responses for each of `rollout.num_engines`, which has places for {running}"
