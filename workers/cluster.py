"""Ray: joining or starting a cluster, what it has, and where each role runs.

In: the configuration. Out: Ray options for every engine, actor rank and reward worker, or an error that says what was
asked, what is there, and for which pool.
"""

import logging
import os
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo.config import Config

GIB = 1 << 30


def connect(address: str, *, worker_logs: bool) -> None:
    """Joins the cluster at `address` (`auto`, host:port), or starts one on this machine where it is `local` or where
    neither it nor RAY_ADDRESS is set."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    target = address or os.environ.get("RAY_ADDRESS", "local")
    local: dict[str, Any] = {}
    if target == "local":
        local = {"include_dashboard": False, "object_store_memory": _object_store_bytes()}
    ray.init(address=target, log_to_driver=worker_logs, logging_level=logging.ERROR, **local)


def _object_store_bytes() -> int:
    """A fifth of the memory, at most 8 GiB: the steps of a run on one machine fit many times over."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total // 5, 8 * GIB)


def resolve_device(requested: str) -> str:
    """`cpu` or `cuda`; `auto` is cuda where the cluster has GPUs."""
    if requested != "auto":
        return requested
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


def gpus_per_engine(cfg: Config) -> int:
    """One engine's GPUs: tensor times pipeline parallel size."""
    return cfg.rollout.vllm.get("tensor_parallel_size", 1) * cfg.rollout.vllm.get("pipeline_parallel_size", 1)


def check_gpus(cfg: Config, available: int) -> None:
    """Raises ValueError when the pools together ask for more GPUs than the cluster has."""
    engines = cfg.rollout.num_engines * gpus_per_engine(cfg)
    actors = cfg.actor.num_workers
    if engines + actors > available:
        raise ValueError(
            f"asked for {engines + actors} GPUs but the Ray cluster has {available}: "
            f"{engines} for rollout (`rollout.num_engines` {cfg.rollout.num_engines} x {gpus_per_engine(cfg)} each) "
            f"and {actors} for the actors (`actor.num_workers`); lower them, add nodes, or set `trainer.device=cpu`"
        )


def engine_args(cfg: Config, device: str) -> dict[str, Any]:
    """vLLM's arguments: what follows from other keys, the needs of a CPU engine, and `rollout.vllm` above both."""
    window = cfg.data.max_prompt_length + cfg.data.max_response_length
    args: dict[str, Any] = {
        "dtype": cfg.model.dtype,
        "max_model_len": window,
        "seed": cfg.trainer.seed,
        "trust_remote_code": cfg.model.trust_remote_code,
    }
    if device == "cpu":
        args |= {
            "enforce_eager": True,
            # A seeded request whose prefill is split kills a CPU engine ("CPU Generator does not use offset").
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(window, 8192),
        }
        if gpus_per_engine(cfg) == 1:
            args["distributed_executor_backend"] = "uni"
    return args | cfg.rollout.vllm


class Placement:
    """Ray options for each role: GPUs by one placement group on CUDA, thread counts on CPU."""

    def __init__(self, cfg: Config, device: str) -> None:
        self._cfg = cfg
        self._device = device
        self._group: PlacementGroup | None = None
        if device == "cpu" and cfg.actor.offload:
            raise ValueError(
                "`actor.offload` (true) moves state from GPU to host memory, and `trainer.device` is cpu; unset it"
            )
        if device == "cuda":
            if cfg.model.dtype == "float32":
                raise ValueError("`model.dtype` (float32) has no packed attention kernel on a GPU; use bfloat16")
            check_gpus(cfg, int(ray.cluster_resources().get("GPU", 0)))
            engines = [{"GPU": gpus_per_engine(cfg), "CPU": 1}] * cfg.rollout.num_engines
            actors = [{"GPU": 1, "CPU": 1}] * cfg.actor.num_workers
            self._group = placement_group(engines + actors, strategy="PACK")
            if not self._group.wait(timeout_seconds=cfg.actor.start_timeout_s):
                raise RuntimeError(
                    f"the Ray cluster could not place {len(engines)} engines of {gpus_per_engine(cfg)} GPUs and "
                    f"{len(actors)} actor ranks within {cfg.actor.start_timeout_s:g} s (`actor.start_timeout_s`): "
                    "an engine's GPUs must lie on one node, and other jobs may hold some"
                )

    def rollout(self) -> list[dict[str, Any]]:
        """One entry per engine."""
        env = {
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self._device == "cpu":
            env |= {
                "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(self._cfg.rollout.cpu_threads),
                "TORCHDYNAMO_DISABLE": "1",  # spares the inductor compile at start
                # AsyncLLM ignores this, but a CPU engine honours `uni` only under it: one process and one hop less.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }
        gpus = gpus_per_engine(self._cfg)
        return [self._options(i, gpus, env) for i in range(self._cfg.rollout.num_engines)]

    def actors(self) -> list[dict[str, Any]]:
        """One entry per FSDP rank."""
        env = {"TOKENIZERS_PARALLELISM": "false"}
        if self._device == "cpu":
            env["OMP_NUM_THREADS"] = str(self._cfg.actor.cpu_threads)
        first = self._cfg.rollout.num_engines
        return [self._options(first + rank, 1, env) for rank in range(self._cfg.actor.num_workers)]

    def rewards(self) -> dict[str, Any]:
        """Of every reward worker: no GPU, and no CPU reserved, because verdicts are short."""
        return {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}

    def _options(self, bundle: int, gpus: int, env: dict[str, str]) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": env}}
        if self._group is not None:
            options |= {
                "num_cpus": 1,
                "num_gpus": gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=bundle
                ),
            }
        return options
