"""Decides what follows from the configuration for several roles at once: pure, so that the planner knows it too.
It loads neither torch nor Ray."""

import math
from collections.abc import Sequence

from dapo.config.devices import gpus_per_engine
from dapo.config.schema import Config
from dapo.config.sources import SourceConfig

LENT_TRANSPORT = "ipc"  # of the weights for engines that are lent GPUs: from the rank on the same one


def device_of(cfg: Config) -> str:
    """Returns `cpu` or `cuda`: `auto` is cuda, whatever is there, unless the configuration only fits a CPU: GPUs have
    no float32 packed attention."""
    if cfg.trainer.device != "auto":
        return cfg.trainer.device
    return "cpu" if cfg.model.dtype == "float32" else "cuda"


def resolve_transport(cfg: Config) -> str:
    """Returns `weight_sync.transport` with `auto` decided; engines that are lent GPUs take `LENT_TRANSPORT`."""
    if cfg.weight_sync.transport != "auto":
        return cfg.weight_sync.transport
    return "ipc" if shares_gpus(cfg) and not lends(cfg) else "broadcast"


def shares_gpus(cfg: Config) -> bool:
    """Returns whether engines and actors are on the same GPUs (`trainer.colocate`)."""
    return cfg.trainer.colocate != "none"


def shares_prompts(cfg: Config) -> bool:
    """Returns whether the actors compute a prompt once for several responses: their own attention can."""
    return cfg.model.attn_implementation == "auto"


def takes_turns(cfg: Config) -> bool:
    """Returns whether the engines on the actors' GPUs sleep while these train, and each has all of a GPU meanwhile."""
    return cfg.trainer.colocate in ("time", "lend")


def halve_roles(cfg: Config) -> None:
    """Leaves out, in place, the role that half a run (`trainer.only`) does without."""
    if cfg.trainer.only == "both":
        return
    cfg.trainer.colocate = "none"
    if cfg.trainer.only == "rollout":
        cfg.actor.num_workers = 0
    else:
        cfg.rollout.num_engines = 0


def lends(cfg: Config) -> bool:
    """Returns whether engines wake on the actors' GPUs when that pays, beside engines with GPUs of their own."""
    return cfg.trainer.colocate == "lend"


def lent_engines(cfg: Config) -> int:
    """Counts the engines on the actors' GPUs that help those with GPUs of their own, whose numbers they follow."""
    return cfg.actor.num_workers // gpus_per_engine(cfg.rollout.vllm) if lends(cfg) else 0


def ranks_of_a_piece(cfg: Config) -> int:
    """Counts the neighbouring ranks that must lie on one node: those that share a sequence, and, where engines own the
    GPUs of ranks, whole engines' worth of them."""
    owned = gpus_per_engine(cfg.rollout.vllm) if takes_turns(cfg) else 1
    return math.lcm(cfg.actor.ulysses_sequence_parallel_size, owned)


def transfer_timeout_s(cfg: Config) -> float:
    """Returns how long one transfer of a weight sync may take in seconds: an engine that stands still may not hold up
    the actors longer than it may hold up a group."""
    return min(cfg.weight_sync.timeout_s, cfg.rollout.stall_timeout_s)


def response_caps(sources: Sequence[SourceConfig]) -> dict[str, int]:
    """Returns the longest response in tokens of each entry of `data.sources` that does not have
    `data.max_response_length`, by name."""
    return {source.name: source.max_response_length for source in sources if source.max_response_length}


def optimizer_steps(cfg: Config) -> int:
    """Counts the optimizer steps of one update: mini-batches times `actor.ppo_epochs`."""
    return cfg.data.train_batch_size // cfg.actor.ppo_mini_batch_size * cfg.actor.ppo_epochs


def num_shards(cfg: Config) -> int:
    """Returns FSDP ranks that one copy of the parameters is sharded over: `actor.fsdp_size` with -1, all ranks,
    decided."""
    return cfg.actor.num_workers if cfg.actor.fsdp_size == -1 else cfg.actor.fsdp_size
