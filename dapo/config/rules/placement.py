"""Checks of where roles run and how weights travel between them."""

import math
from collections.abc import Iterator

from dapo.config.devices import gpus_per_engine
from dapo.config.rules.engine import GPU_MEMORY_UTILIZATION
from dapo.config.schema import Config


def placement(cfg: Config) -> Iterator[str]:
    if cfg.rollout.engines_per_gpu > 1 and cfg.trainer.device != "cpu":
        yield from _engines_on_a_gpu(cfg)
    if cfg.rollout.max_engines:
        yield from _growing(cfg)
    if cfg.trainer.colocate != "none":
        yield from _shared_gpus(cfg)
    elif cfg.weight_sync.transport == "ipc":
        yield (
            "`weight_sync.transport` (ipc) hands over memory of a GPU that both roles share, and `trainer.colocate` is "
            "none; take auto, or set `trainer.colocate=time`"
        )
    if cfg.trainer.colocate == "none" and cfg.actor.offload == "phase":
        yield (
            "`actor.offload` (phase) moves the optimizer state to the host while engines have the rank's GPU, and with "
            "`trainer.colocate` (none) they never have it; take none or host, or set `trainer.colocate=time` or lend"
        )


def _growing(cfg: Config) -> Iterator[str]:
    most, least = cfg.rollout.max_engines, cfg.rollout.num_engines
    if cfg.trainer.colocate == "time":
        yield (
            f"`rollout.max_engines` ({most}) is for engines with GPUs of their own, and `trainer.colocate` is "
            "time; leave it out, or set `trainer.colocate=none` or lend"
        )
    if most < least:
        yield f"`rollout.max_engines` ({most}) is less than `rollout.num_engines` ({least}); raise it, or leave it out"


def outside(cfg: Config) -> Iterator[str]:
    listens = cfg.rollout.outside
    if not listens.listen:
        return
    needs = {
        f"rollout.outside.{name}": getattr(listens, name) for name in ("certificate_file", "key_file", "token_file")
    }
    if missing := [
        f"`{name}`" for name, value in (needs | {"weight_sync.store": cfg.weight_sync.store}).items() if not value
    ]:
        yield (
            f"`rollout.outside.listen` ({listens.listen}) lets engines of other places in, over TLS and with a token "
            f"alone: {', '.join(missing)} must be given too"
        )
    refused = {
        f"`trainer.colocate` ({cfg.trainer.colocate})": cfg.trainer.colocate != "none",
        f"`trainer.only` ({cfg.trainer.only})": cfg.trainer.only != "both",
        "`rollout.replay_experts` (true)": cfg.rollout.replay_experts,
    }
    for what in (what for what, holds in refused.items() if holds):
        yield f"`rollout.outside.listen` ({listens.listen}) does not go with {what}; leave one of them out"


def _engines_on_a_gpu(cfg: Config) -> Iterator[str]:
    own, gpus = f"`rollout.engines_per_gpu` ({cfg.rollout.engines_per_gpu})", gpus_per_engine(cfg.rollout.vllm)
    if cfg.trainer.colocate != "time":
        yield (
            f"{own} must be 1 with `trainer.colocate` ({cfg.trainer.colocate}): NCCL, which brings the weights then, "
            "takes no two members on one GPU; set it to 1, or `trainer.colocate=time`"
        )
    if gpus > 1:
        yield (
            f"{own} must be 1 for engines of several GPUs ({gpus}, `rollout.vllm.tensor_parallel_size`); set one of "
            "them to 1"
        )
    share, most = cfg.rollout.vllm.get("gpu_memory_utilization"), GPU_MEMORY_UTILIZATION / cfg.rollout.engines_per_gpu
    if share is None or (isinstance(share, int | float) and share * cfg.rollout.engines_per_gpu > 1):
        yield (
            f"`rollout.vllm.gpu_memory_utilization` ({'missing' if share is None else share}) is the share of one "
            f"engine, and a GPU has {own}; set it to {math.floor(100 * most) / 100} or less"
        )


def _shared_gpus(cfg: Config) -> Iterator[str]:
    if cfg.rollout.vllm.get("enable_sleep_mode") is False:
        yield (
            "`rollout.vllm.enable_sleep_mode` (false) keeps an engine's memory while it sleeps, and with "
            f"`trainer.colocate` ({cfg.trainer.colocate}) the actors need it then; leave it out"
        )
    if cfg.trainer.colocate == "lend":
        yield from _lent(cfg)
        return
    yield from _owned(cfg)
    if cfg.rollout.node_labels and cfg.rollout.node_labels != cfg.actor.node_labels:
        yield (
            f"`rollout.node_labels` ({dict(cfg.rollout.node_labels)}) must be empty or `actor.node_labels` "
            f"({dict(cfg.actor.node_labels)}) with `trainer.colocate`, where engines share the ranks' GPUs; leave "
            "it out, `actor.node_labels` holds for both"
        )
    if cfg.trainer.device != "cpu" and cfg.weight_sync.transport == "broadcast":
        yield (
            "`weight_sync.transport` (broadcast) is NCCL, which takes no two members on one GPU as with "
            "`trainer.colocate`; take auto or ipc"
        )


def _owned(cfg: Config) -> Iterator[str]:
    """Requires that the engines' GPUs are exactly the ranks' GPUs (`trainer.colocate=time`)."""
    gpus, each = gpus_per_engine(cfg.rollout.vllm), cfg.rollout.engines_per_gpu
    engines, ranks = cfg.rollout.num_engines, cfg.actor.num_workers
    if cfg.trainer.device == "cpu" or engines * gpus == ranks * each:
        return
    if each > 1:
        yield (
            f"with `trainer.colocate=time` `rollout.num_engines` ({engines}) must be `actor.num_workers` ({ranks}) "
            f"times `rollout.engines_per_gpu` ({each}); set `rollout.num_engines={ranks * each}`"
        )
    else:
        yield (
            f"with `trainer.colocate=time` `rollout.num_engines` ({engines}) times "
            f"`rollout.vllm.tensor_parallel_size` ({gpus}) must be `actor.num_workers` ({ranks}): each engine owns the "
            f"GPUs of {gpus} ranks; set {_that_fit(cfg)}, or `trainer.colocate=none`"
        )


def _that_fit(cfg: Config) -> str:
    """Returns settings that give every rank an engine: other engines, else the nearest counts of ranks or GPUs."""
    gpus, ranks = gpus_per_engine(cfg.rollout.vllm), cfg.actor.num_workers
    if ranks % gpus == 0:
        return f"`rollout.num_engines={ranks // gpus}`"
    below = ranks // gpus
    found = [
        f"`actor.num_workers={engines * gpus}` with `rollout.num_engines={engines}`"
        for engines in (below, below + 1)
        if engines
    ]
    key, stages = "rollout.vllm.tensor_parallel_size", cfg.rollout.vllm.get("pipeline_parallel_size", 1)
    sizes = [size for size in range(1, ranks // stages + 1) if ranks % (size * stages) == 0]
    if sizes:
        near = min(sizes, key=lambda size: abs(size * stages - gpus))
        found.append(f"`{key}={near}` with `rollout.num_engines={ranks // (near * stages)}`")
    return ", or ".join(found)


def _lent(cfg: Config) -> Iterator[str]:
    """Requires that the ranks' GPUs hold whole engines (`trainer.colocate=lend`)."""
    gpus, ranks = gpus_per_engine(cfg.rollout.vllm), cfg.actor.num_workers
    if ranks % gpus or ranks < gpus:
        yield (
            f"with `trainer.colocate=lend` `actor.num_workers` ({ranks}) must be a multiple of "
            f"`rollout.vllm.tensor_parallel_size` ({gpus}): {gpus} ranks lend their GPUs to one engine; change either, "
            "or set `trainer.colocate=none`"
        )
    if cfg.weight_sync.transport == "ipc":
        yield (
            "`weight_sync.transport` (ipc) hands over memory of a GPU that both roles share, and with "
            "`trainer.colocate=lend` `rollout.num_engines` of the engines have GPUs of their own; take auto or "
            "broadcast (those on the ranks' GPUs use ipc)"
        )
