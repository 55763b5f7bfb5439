"""Joins or starts a Ray cluster, sees what it has, and decides where each role runs.

In: the configuration. Out: Ray options for every engine, actor rank and reward worker, or an error that says what was
asked, what is there, and for which pool.
"""

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo.config.schema import Config
from dapo.derived import gpus_per_engine
from dapo.faults.points import fault_environment
from dapo.report.watchdog import waiting
from workers.own_cluster import on_loopback, own_token

GIB = 1 << 30
OWN_HEAD_S, HEAD_S = 5.0, 30.0  # Ray itself gives up after 60 s, and leaves no time to save
COLOCATED_SHARE = 0.5  # of a GPU, as Ray counts it, for either role; memory is divided by gpu_memory_utilization
RANKS, REWARD_MODEL = "actor ranks", "reward model"  # names of placement groups
PLACED_S = 10.0  # in which Ray gives bundles of a lost node another place where there is one

_own = ExitStack()  # what a cluster of our own has changed in this process


def connect(address: str, *, worker_logs: bool) -> None:
    """Joins the cluster at `address` (`auto`, host:port), or starts one on this machine, and for it alone, where it is
    `local` or where neither it nor RAY_ADDRESS is set. `leave` ends it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    target = _target(address)
    local: dict[str, Any] = {}
    if target == "local":
        local = {"include_dashboard": False, "object_store_memory": _object_store_bytes()}
        _own.enter_context(own_token())
    try:
        with on_loopback() if target == "local" else nullcontext():
            ray.init(address=target, log_to_driver=worker_logs, logging_level=logging.ERROR, **local)
    except BaseException:
        leave()
        raise


def leave() -> None:
    """Leaves the cluster, or ends the one that `connect` has started."""
    try:
        ray.shutdown()
    finally:
        _own.close()


def _target(address: str) -> str:
    return address or os.environ.get("RAY_ADDRESS", "local")


def head(address: str) -> tuple[str, float]:
    """Returns where Ray's head process takes connections, HOST:PORT, and for how many seconds it may take none.

    Nobody starts that of a cluster of our own again. address: as in `connect`, which comes first.
    """
    return ray.get_runtime_context().gcs_address, OWN_HEAD_S if _target(address) == "local" else HEAD_S


def _object_store_bytes() -> int:
    """Returns a fifth of the memory, at most 8 GiB: the steps of a run on one machine fit many times over."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total // 5, 8 * GIB)


def resolve_device(requested: str) -> str:
    """Returns `cpu` or `cuda`; `auto` is cuda where the cluster has GPUs."""
    if requested != "auto":
        return requested
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


def reward_model_device(cfg: Config, device: str) -> str:
    """Returns where the reward model runs, `cpu` or `cuda`. device: the trainer's, from `resolve_device`."""
    return device if cfg.reward.model.device == "auto" else cfg.reward.model.device


def reward_model_gpus(cfg: Config, device: str) -> int:
    """Counts the whole GPUs for all copies of the reward model; copies share one where their shares fit. device: the
    trainer's."""
    model = cfg.reward.model
    if not model.path or reward_model_device(cfg, device) == "cpu":
        return 0
    return math.ceil(model.num_workers / int(1 / model.num_gpus))


def _gpus_asked(cfg: Config, device: str) -> dict[str, int]:
    """Returns GPUs by the role that asks for them, in words; device: the trainer's."""
    asked = {"the reward model (`reward.model.num_workers` x `num_gpus`)": reward_model_gpus(cfg, device)}
    if device == "cuda":
        per_engine = gpus_per_engine(cfg.rollout.vllm)
        if cfg.trainer.colocate:
            asked["actors and engines together (`actor.num_workers`, `trainer.colocate`)"] = cfg.actor.num_workers
        else:
            asked[f"rollout (`rollout.num_engines` {cfg.rollout.num_engines} x {per_engine} each)"] = (
                cfg.rollout.num_engines * per_engine
            )
            asked["the actors (`actor.num_workers`)"] = cfg.actor.num_workers
    return {role: gpus for role, gpus in asked.items() if gpus}


def count_gpus(cfg: Config, device: str) -> int:
    """Counts the GPUs of all pools together. device: the trainer's."""
    return sum(_gpus_asked(cfg, device).values())


def check_gpus(cfg: Config, available: int, device: str = "cuda") -> None:
    """Raises ValueError when the pools together ask for more GPUs than the cluster has. device: the trainer's."""
    asked = _gpus_asked(cfg, device)
    if sum(asked.values()) > available:
        pools = ", ".join(f"{gpus} for {role}" for role, gpus in asked.items())
        raise ValueError(
            f"asked for {sum(asked.values())} GPUs but the Ray cluster has {available}: {pools}; lower them, add "
            "nodes, or set `trainer.device=cpu` (`reward.model.device=cpu` for the reward model alone)"
        )


def engine_args(cfg: Config, device: str) -> dict[str, Any]:
    """Returns vLLM's arguments: what follows from other keys, the needs of a CPU engine, and `rollout.vllm` above
    both.
    """
    window = cfg.data.max_prompt_length + cfg.data.max_response_length
    args: dict[str, Any] = {
        "dtype": cfg.model.dtype,
        "max_model_len": window,
        "seed": cfg.trainer.seed,
        "trust_remote_code": cfg.model.trust_remote_code,
        "load_format": "safetensors",  # vLLM would also take pickles
    }
    if device == "cpu":
        args |= {
            "enforce_eager": True,
            # A seeded request whose prefill is split kills a CPU engine ("CPU Generator does not use offset").
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(window, 8192),
        }
        if gpus_per_engine(cfg.rollout.vllm) == 1:
            args["distributed_executor_backend"] = "uni"
    elif gpus_per_engine(cfg.rollout.vllm) > 1:
        # Inside a placement group vLLM would choose Ray, and refuse our bundles of several GPUs, which are of one node.
        args["distributed_executor_backend"] = "mp"
    return args | cfg.rollout.vllm


def _bundles(cfg: Config, device: str) -> dict[str, list[dict[str, float]]]:
    """Returns the bundles of each placement group, by its name: one group per engine, one of all actor ranks, one of
    all copies of the reward model; each only on GPUs.

    The ranks come first, to fill whole nodes. Colocated, engine i shares bundle i of the ranks, hence its GPU.
    """
    groups: dict[str, list[dict[str, float]]] = {}
    if device == "cuda" and cfg.trainer.colocate:
        groups[RANKS] = [{"GPU": 1, "CPU": 2}] * cfg.actor.num_workers
    elif device == "cuda":
        groups[RANKS] = [{"GPU": 1, "CPU": 1}] * cfg.actor.num_workers
        for number in range(cfg.rollout.num_engines):
            groups[_engine(number)] = [{"GPU": gpus_per_engine(cfg.rollout.vllm), "CPU": 1}]
    if reward_model_gpus(cfg, device):
        groups[REWARD_MODEL] = [{"GPU": cfg.reward.model.num_gpus, "CPU": 1}] * cfg.reward.model.num_workers
    return {name: bundles for name, bundles in groups.items() if bundles}


def _engine(number: int) -> str:
    return f"engine {number}"


class Placement:
    """Holds Ray options for each role: GPUs by placement groups on CUDA, thread counts on CPU.

    Ray finds the bundles of a node that is gone another place by itself, those of one group all or none, as soon as
    there is room. Groups of their own keep an engine that finds none from holding up the ranks.
    """

    def __init__(self, cfg: Config, device: str, *, warn: Callable[[str], None] = lambda line: None) -> None:
        """Waits until every role has a place. warn: told what is waited for later, when a node is gone."""
        self._cfg = cfg
        self._device = device
        self._warn = warn
        self._groups: dict[str, PlacementGroup] = {}
        if device == "cuda" and cfg.model.dtype == "float32":
            raise ValueError("`model.dtype` (float32) has no packed attention kernel on a GPU; use bfloat16")
        if bundles := _bundles(cfg, device):
            check_gpus(cfg, int(ray.cluster_resources().get("GPU", 0)), device)
            self._groups = {name: placement_group(those, strategy="PACK") for name, those in bundles.items()}
            deadline = time.monotonic() + cfg.actor.start_timeout_s
            for group in self._groups.values():
                with waiting("Ray to place engines and actors on GPUs"):
                    placed = group.wait(timeout_seconds=max(0.0, deadline - time.monotonic()))
                if not placed:
                    pools = ", ".join(f"{gpus} GPUs for {role}" for role, gpus in _gpus_asked(cfg, device).items())
                    raise RuntimeError(
                        f"the Ray cluster could not place {pools} within {cfg.actor.start_timeout_s:g} s "
                        "(`actor.start_timeout_s`): an engine's GPUs must lie on one node, and other jobs may hold some"
                    )

    def rollout(self) -> list[dict[str, Any]]:
        """Returns one entry per engine."""
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
        count = self._cfg.rollout.num_engines
        if self._cfg.trainer.colocate:
            return [self._options(self._device, RANKS, i, COLOCATED_SHARE, env) for i in range(count)]
        gpus = gpus_per_engine(self._cfg.rollout.vllm)
        return [self._options(self._device, _engine(i), 0, gpus, env) for i in range(count)]

    def release_engine(self, number: int) -> None:
        """Gives the GPUs of an engine that is not started again back to the cluster, for whoever lost a node."""
        if group := self._groups.pop(_engine(number), None):
            remove_placement_group(group)

    def actors(self) -> list[dict[str, Any]]:
        """Returns one entry per FSDP rank; neighbours are on one node, which sequence parallelism and shard groups live
        on. Where a node is gone, waits until the cluster has room for its ranks.

        Raises:
            RuntimeError: it has none within `actor.start_timeout_s`.
        """
        env = {"TOKENIZERS_PARALLELISM": "false"}
        if self._device == "cpu":
            env["OMP_NUM_THREADS"] = str(self._cfg.actor.cpu_threads)
        gpus = COLOCATED_SHARE if self._cfg.trainer.colocate else 1
        # Ray sorts bundles of one size in any order before it fills a node.
        node_of = self._nodes_of_ranks()
        bundles = sorted(range(self._cfg.actor.num_workers), key=lambda i: node_of.get(i, ""))
        return [self._options(self._device, RANKS, bundle, gpus, env) for bundle in bundles]

    def _nodes_of_ranks(self) -> dict[int, str]:
        """Returns the node of each bundle, empty on CPUs."""
        group = self._groups.get(RANKS)
        if group is None:
            return {}
        limit = self._cfg.actor.start_timeout_s
        if not group.wait(timeout_seconds=PLACED_S):
            self._warn(
                f"a node is gone, and the others have no {self._missing(group)} for its actor ranks; waiting "
                f"{limit:.0f} s (`actor.start_timeout_s`) for one that joins the Ray cluster"
            )
            with waiting("a node with room for actor ranks to join the Ray cluster"):
                placed = group.wait(timeout_seconds=limit)
            if not placed:
                raise RuntimeError(
                    f"for {limit:g} s (`actor.start_timeout_s`) the Ray cluster had no {self._missing(group)} for "
                    "actor ranks whose node is gone; add a node to it"
                )
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        return nodes

    def _missing(self, group: PlacementGroup) -> str:
        placed = [node for node in placement_group_table(group)["bundles_to_node_id"].values() if node]
        return f"{self._cfg.actor.num_workers - len(placed)} GPUs"

    def reward_model(self) -> list[dict[str, Any]]:
        """Returns one entry per copy of the reward model."""
        model, device = self._cfg.reward.model, reward_model_device(self._cfg, self._device)
        env = {"TOKENIZERS_PARALLELISM": "false"}
        if device == "cpu":
            env["OMP_NUM_THREADS"] = str(model.cpu_threads)
        return [self._options(device, REWARD_MODEL, i, model.num_gpus, env) for i in range(model.num_workers)]

    def rewards(self) -> dict[str, Any]:
        """Returns the options of every reward worker: no GPU, and no CPU reserved, because verdicts are short."""
        return {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}

    def _options(self, device: str, group: str, bundle: int, gpus: float, env: dict[str, str]) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": env | fault_environment()}}
        if device == "cuda":
            options |= {
                "num_cpus": 1,
                "num_gpus": gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=self._groups[group], placement_group_bundle_index=bundle
                ),
            }
        return options
