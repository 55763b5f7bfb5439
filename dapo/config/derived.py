"""Settings derived from the configuration that several roles use. Imports neither torch nor Ray, for the planner."""

import math
from collections.abc import Sequence

from dapo.config.actor import PACKED_ATTENTION
from dapo.config.devices import gpus_per_engine
from dapo.config.sampling import SamplingConfig, SourceConfig
from dapo.config.schema import Config

LENT_TRANSPORT = "ipc"  # of the weights for engines that are lent GPUs: from the rank on the same one

EQUALS = 4  # tokens


def device_of(cfg: Config) -> str:
    """Returns `cpu` or `cuda`. `auto` is always cuda, except for float32: no packed attention on GPUs."""
    if cfg.trainer.device != "auto":
        return cfg.trainer.device
    return "cpu" if cfg.model.dtype == "float32" else "cuda"


def resolve_transport(cfg: Config) -> str:
    """Returns `weight_sync.transport` with `auto` resolved; engines that are lent GPUs use `LENT_TRANSPORT`."""
    if cfg.weight_sync.transport != "auto":
        return cfg.weight_sync.transport
    return "ipc" if shares_gpus(cfg) and not lends(cfg) else "broadcast"


def hands_over_memory(cfg: Config) -> bool:
    """Whether ranks pass weights to engines through GPU memory."""
    return cfg.trainer.only == "both" and (lends(cfg) or resolve_transport(cfg) == LENT_TRANSPORT)


def shares_gpus(cfg: Config) -> bool:
    """Whether engines are on the actors' GPUs (`trainer.colocate`): they sleep while the actors train."""
    return cfg.trainer.colocate != "none"


def shares_prompts(cfg: Config) -> bool:
    """Whether the actors compute a prompt once for several responses: their own attention supports it."""
    return cfg.model.attn_implementation in PACKED_ATTENTION


def halve_roles(cfg: Config) -> None:
    """Removes, in place, the role that half a run (`trainer.only`) does not need."""
    if cfg.trainer.only == "both":
        return
    cfg.trainer.colocate, cfg.rollout.engines_per_gpu = "none", 1
    if cfg.trainer.only == "rollout":
        cfg.actor.num_workers = 0
    else:
        cfg.rollout.num_engines = 0


def lends(cfg: Config) -> bool:
    """Whether engines wake on the actors' GPUs when that pays, in addition to engines with their own GPUs."""
    return cfg.trainer.colocate == "lend"


def lent_engines(cfg: Config) -> int:
    """Returns the number of engines on the actors' GPUs; they are numbered after those with their own GPUs."""
    return cfg.actor.num_workers // gpus_per_engine(cfg.rollout.vllm) if lends(cfg) else 0


def ranks_of_a_piece(cfg: Config) -> int:
    """Returns how many neighbouring ranks must be on one node. These are ranks that share a sequence and, where engines
    use the GPUs of ranks, those of whole engines."""
    owned = gpus_per_engine(cfg.rollout.vllm) if shares_gpus(cfg) else 1
    return math.lcm(cfg.actor.ulysses_sequence_parallel_size, owned)


def transfer_timeout_s(cfg: Config) -> float:
    """Returns the limit in seconds of one transfer of a weight sync. A hanging engine may not delay the actors longer
    than it may delay a group."""
    return min(cfg.weight_sync.timeout_s, cfg.rollout.stall_timeout_s)


def response_caps(sources: Sequence[SourceConfig]) -> dict[str, int]:
    """Returns `max_response_length` in tokens by name, for the entries of `data.sources` that have their own."""
    return {source.name: source.max_response_length for source in sources if source.max_response_length}


def truncates(sampling: SamplingConfig) -> bool:
    """Whether some tokens cannot be sampled."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def support_size(cfg: Config) -> int:
    """Returns the most tokens per position that engines return in training, most likely first; 0: none."""
    # The k-th most likely token may have equals, which vLLM keeps too.
    return cfg.rollout.top_k + EQUALS if truncates(cfg.rollout) else cfg.algorithm.score_centering


def optimizer_steps(cfg: Config) -> int:
    """Returns the optimizer steps of one update: mini-batches times `actor.ppo_epochs`."""
    return cfg.data.train_batch_size // cfg.actor.ppo_mini_batch_size * cfg.actor.ppo_epochs


def num_shards(cfg: Config) -> int:
    """Returns the number of FSDP ranks that one copy of the parameters is sharded over (`actor.fsdp_size`; -1: all)."""
    return cfg.actor.num_workers if cfg.actor.fsdp_size == -1 else cfg.actor.fsdp_size
