"""What follows from the configuration for several roles at once: pure, so that the planner knows it too."""

from collections.abc import Mapping
from typing import Any

from dapo.config.schema import Config


def gpus_per_engine(engine_args: Mapping[str, Any]) -> int:
    """One engine's GPUs, and its worker processes: tensor times pipeline parallel size of vLLM's arguments."""
    return int(engine_args.get("tensor_parallel_size", 1)) * int(engine_args.get("pipeline_parallel_size", 1))


def resolve_transport(cfg: Config, device: str) -> str:
    """`weight_sync.transport` with `auto` decided. device: `cpu` or `cuda`, the trainer's."""
    if cfg.weight_sync.transport != "auto":
        return cfg.weight_sync.transport
    if cfg.trainer.colocate:
        return "ipc"
    return "broadcast" if device == "cuda" else "object_store"
