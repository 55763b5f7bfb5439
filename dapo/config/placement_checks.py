"""Checks of where roles run and how weights travel between them, before any worker starts: part of
`dapo.config.checks`.

In: a `Config`. Out: one line per problem, with key, value and remedy.
"""

from collections.abc import Iterator

from dapo.config.schema import Config


def placement(cfg: Config) -> Iterator[str]:
    """Requires that colocated roles share GPUs one to one, and that the transport suits."""
    if cfg.trainer.colocate:
        yield from _shared_gpus(cfg)
    elif cfg.weight_sync.transport == "ipc":
        yield (
            "`weight_sync.transport` (ipc) hands over memory of a GPU that both roles share, and `trainer.colocate` is "
            "false; take auto, or set `trainer.colocate=true`"
        )


def _shared_gpus(cfg: Config) -> Iterator[str]:
    engines, ranks = cfg.rollout.num_engines, cfg.actor.num_workers
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = cfg.rollout.vllm.get(name, 1)
        if size != 1:
            yield (
                f"`rollout.vllm.{name}` ({size}) must be 1 with `trainer.colocate`, where each engine shares the GPU "
                "of one actor rank; raise `rollout.num_engines` instead, or set `trainer.colocate=false`"
            )
    if engines != ranks:
        yield (
            f"`trainer.colocate` gives each of `rollout.num_engines` ({engines}) the GPU of one of "
            f"`actor.num_workers` ({ranks}); make them equal, or set `trainer.colocate=false`"
        )
    if cfg.rollout.node_labels and cfg.rollout.node_labels != cfg.actor.node_labels:
        yield (
            f"`rollout.node_labels` ({dict(cfg.rollout.node_labels)}) must be empty or `actor.node_labels` "
            f"({dict(cfg.actor.node_labels)}) with `trainer.colocate`, where engines share the ranks' GPUs; leave "
            "it out, `actor.node_labels` holds for both"
        )
    if cfg.trainer.device == "cpu":
        return
    if cfg.weight_sync.transport == "broadcast":
        yield (
            "`weight_sync.transport` (broadcast) is NCCL, which takes no two members on one GPU as with "
            "`trainer.colocate`; take auto or ipc"
        )
    if "gpu_memory_utilization" not in cfg.rollout.vllm:
        yield (
            "`rollout.vllm.gpu_memory_utilization` is missing: vLLM would take 0.92 of a GPU that `trainer.colocate` "
            "shares with an actor rank; give the engine's part, such as 0.5 (`python -m dapo.plan` says what the actor "
            "needs)"
        )
