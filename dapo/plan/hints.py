"""Reports settings that divide badly and leave ranks, engines or memory idle."""

from collections.abc import Iterator

from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.derived import device_of, num_shards
from dapo.plan.engine import EngineMemory
from dapo.plan.step import Step, mean_tokens

GRAPH_SEQUENCES = 512  # vLLM 0.32: default size of the largest captured batch
LOW_FILL, LOW_BALANCE, MANY_IDLE, SLOW_NETWORK = 0.6, 0.9, 0.05, 0.05


def hints(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    step, engine = Step(cfg, shape), EngineMemory(cfg, shape)
    return [*_ranks(cfg, step), *_shards(cfg, shape, engine), *_heads(cfg, shape, engine), *_engines(cfg, step, engine)]


def _ranks(cfg: PlannedConfig, step: Step) -> Iterator[str]:
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


def _shards(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[str]:
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


def _heads(cfg: PlannedConfig, shape: ModelShape, engine: EngineMemory) -> Iterator[str]:
    shared, keys = cfg.actor.ulysses_sequence_parallel_size, shape.num_kv_heads
    if shared > keys:
        yield f"`actor.ulysses_sequence_parallel_size` ({shared}) exceeds the {keys} key-value heads: they are copied"
    if engine.tensor_parallel > keys:
        yield (
            f"`rollout.vllm.tensor_parallel_size` ({engine.tensor_parallel}) exceeds the {keys} key-value heads: the "
            "KV cache holds copies"
        )


def _engines(cfg: PlannedConfig, step: Step, engine: EngineMemory) -> Iterator[str]:
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
