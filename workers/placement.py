"""Decides where each role runs: Ray options for every engine, actor rank and reward worker. Places ranks again if they
lose their node. Before placing, logs what is requested, available and fitting, or raises an error with the same."""

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from dapo.config.derived import gpus_per_engine, lends, lent_engines, num_shards, ranks_of_a_piece, shares_gpus
from dapo.config.rules.engine import batches, on_device, stages
from dapo.config.schema import Config
from dapo.ground.fault_points import fault_environment
from dapo.ground.watchdog import waiting
from dapo.workers.cluster import nodes
from dapo.workers.placing.asked import (
    ENGINES,
    JUDGES,
    OWN_GPUS,
    RANKS,
    REWARD_MODEL,
    Pool,
    judge_device,
    pools,
    reward_model_device,
)
from dapo.workers.placing.fit import in_order, lines, placed, problems
from dapo.workers.placing.joining import POLL_S, nodes_with_room

PLACED_S = 10.0  # within which Ray places bundles of a lost node again if there is room


def _bundles(cfg: Config, pool: Pool) -> dict[str, list[dict[str, float]]]:
    """Returns the bundles of each placement group of a pool, by group name: one group per engine, one per judge, one
    for all actor ranks, one for all copies of the reward model. A bundle lies on one node. A bundle of ranks holds all
    that share a sequence or an engine."""
    whole: dict[str, float] = {"GPU": pool.gpus, "CPU": pool.cpus}
    if pool.name == ENGINES:
        return {_engine(number): [whole] for number in range(pool.count)}
    if pool.name == JUDGES:
        return {_judge(number): [whole] for number in range(pool.count)}
    if pool.name == REWARD_MODEL:
        return {pool.name: [{"GPU": cfg.reward.model.num_gpus, "CPU": 1}] * cfg.reward.model.num_workers}
    return {pool.name: [whole] * pool.count}


def _engine(number: int) -> str:
    return f"engine {number}"


def _judge(number: int) -> str:
    return f"judge {number}"


class Placement:
    """Ray options for each role: GPUs through placement groups on CUDA, thread counts on CPU. After a node loss Ray
    places the bundles of a group again by itself, all or none, once there is room. Each engine has its own group, so
    that one without room does not block the ranks."""

    def __init__(
        self,
        cfg: Config,
        device: str,
        *,
        warn: Callable[[str], None] = lambda line: None,
        say: Callable[[str], None] = lambda line: None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits until every role has a place. say: logs what is requested, available and fitting. warn: logs waits, now
        or after a node loss. given_up: returns whether to stop waiting. Raises ValueError if, also after
        `trainer.nodes_timeout_s`, the cluster is too small or no node has a pool's labels; RuntimeError without a place
        within `actor.start_timeout_s`."""
        self._cfg = cfg
        self._device = device
        self._warn = warn
        self._given_up = given_up
        self._groups: dict[str, PlacementGroup] = {}
        if device == "cuda" and cfg.model.dtype == "float32":
            raise ValueError("`model.dtype` (float32) has no packed attention on a GPU; use bfloat16 or float16")
        if found := [*on_device(cfg, device), *batches(cfg, device), *stages(cfg, device)]:
            raise ValueError(found[0])
        asked = pools(cfg, device)
        if not asked:
            return
        there = nodes_with_room(asked, nodes, cfg.trainer.nodes_timeout_s, warn=warn, given_up=given_up)
        for line in lines(asked, there):
            say(line)
        if found := problems(asked, there):
            raise ValueError("\n".join(found))
        now = placed(asked, there, free=True)
        if any(now[pool.name] < pool.count for pool in asked):
            warn(
                f"waiting up to {cfg.actor.start_timeout_s:g} s (`actor.start_timeout_s`) for GPUs that other jobs hold"
            )
        for pool in asked:
            self._reserve(pool)
        self._wait(asked)
        self._bundles_of_ranks()

    def _reserve(self, pool: Pool) -> None:
        for name, bundles in _bundles(self._cfg, pool).items() if pool.gpus else ():
            labels = [dict(pool.labels)] * len(bundles) if pool.labels else None
            self._groups[name] = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)

    def give_up(self) -> None:
        """Ends every wait for a place, also one in another thread, when nothing is to start any more."""
        self._given_up = lambda: True

    def _found(self, group: PlacementGroup, until: float) -> bool:
        """Waits for a group's placement; False if it has none by `until` (`time.monotonic()`), or the wait is
        cancelled."""
        found = False
        while not found and (left := until - time.monotonic()) > 0 and not self._given_up():
            found = group.wait(timeout_seconds=min(POLL_S, left))
        return found

    def _wait(self, asked: list[Pool]) -> None:
        limit = self._cfg.actor.start_timeout_s
        deadline = time.monotonic() + limit
        for group in self._groups.values():
            with waiting("Ray to place engines and actors on GPUs"):
                found = self._found(group, deadline)
            if not found:
                wanted = ", ".join(f"{pool.all_gpus} GPUs for {pool.about}" for pool in asked if pool.gpus)
                raise RuntimeError(
                    f"the Ray cluster could not place {wanted} within {limit:g} s (`actor.start_timeout_s`): an "
                    "engine's GPUs, and those of ranks that share a sequence, must lie on one node, and "
                    "other jobs may hold some"
                )

    def rollout(self) -> list[dict[str, Any]]:
        """Returns one entry per engine: those with their own GPUs, then those on the ranks' GPUs."""
        env = vllm_environment(self._device, self._cfg.rollout.cpu_threads)
        count, labels = self._cfg.rollout.num_engines, self._cfg.rollout.node_labels
        gpus, each = gpus_per_engine(self._cfg.rollout.vllm), self._cfg.rollout.engines_per_gpu
        own, sharing = (
            (count, lent_engines(self._cfg)) if lends(self._cfg) or not shares_gpus(self._cfg) else (0, count)
        )
        labels_there = self._cfg.actor.node_labels
        bundles = [i // each * gpus // ranks_of_a_piece(self._cfg) for i in range(sharing)]
        return [
            *(self._options(self._device, _engine(i), 0, gpus, env, labels) for i in range(own)),
            # Ray gives their GPUs to the ranks (`ranks_of_engine`).
            *(self._options(self._device, RANKS, bundle, 0, env, labels_there) for bundle in bundles),
        ]

    def another(self) -> tuple[dict[str, Any], Callable[[int], None]]:
        """Waits for a place for one engine more, also for a node that joins the cluster. Returns the engine's options,
        and what to call with its number. Raises RuntimeError once waits are given up (`give_up`)."""
        name, gpus = f"engine that joins {uuid4()}", gpus_per_engine(self._cfg.rollout.vllm)
        if self._device == "cuda":
            [pool] = [each for each in pools(self._cfg, self._device) if each.name == ENGINES]
            labels = [dict(pool.labels)] if pool.labels else None
            bundle: dict[str, float] = {"GPU": pool.gpus, "CPU": pool.cpus}
            self._groups[name] = placement_group([bundle], strategy="PACK", bundle_label_selector=labels)
            with waiting("a place for an engine that joins"):
                if not self._found(self._groups[name], math.inf):
                    raise RuntimeError("no place for an engine that joins was found")
        env = vllm_environment(self._device, self._cfg.rollout.cpu_threads)

        def own(number: int) -> None:
            if name in self._groups:
                self._groups[_engine(number)] = self._groups.pop(name)

        return self._options(self._device, name, 0, gpus, env, self._cfg.rollout.node_labels), own

    def outside(self) -> dict[str, Any] | None:
        """Returns the options of actors that speak for engines outside of the cluster; None if none may come. They are
        on the driver's node, where these engines connect."""
        if not self._cfg.rollout.outside.listen or self._cfg.trainer.only != "both":
            return None
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return {"num_cpus": 0, "scheduling_strategy": here, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}

    def ranks_of_engine(self, number: int) -> list[int]:
        """Returns the ranks whose GPUs an engine uses in its turn; none on CPUs, or if it has its own GPUs."""
        rollout = self._cfg.rollout
        place = number - rollout.num_engines if lends(self._cfg) else number // rollout.engines_per_gpu
        own = place < 0 or (lends(self._cfg) and place >= lent_engines(self._cfg))  # at the start, or joined later
        if self._device == "cpu" or not shares_gpus(self._cfg) or own:
            return []
        gpus, bundles = gpus_per_engine(rollout.vllm), self._bundles_of_ranks()
        bundle, first = divmod(place * gpus, ranks_of_a_piece(self._cfg))
        return [rank for rank, of in enumerate(bundles) if of == bundle][first : first + gpus]

    def release_engine(self, number: int) -> None:
        """Returns the GPUs of an engine that will not restart to the cluster, for roles that lost a node."""
        if group := self._groups.pop(_engine(number), None):
            remove_placement_group(group)

    def actors(self) -> list[dict[str, Any]]:
        """Returns one entry per FSDP rank. Ranks that share a sequence are on one node; those of a shard group are too,
        if a node has room. After a node loss waits for room for its ranks. Raises RuntimeError after
        `actor.start_timeout_s`."""
        env = {"TOKENIZERS_PARALLELISM": "false"}
        if self._device == "cpu":
            env |= _threads(self._cfg.actor.cpu_threads)
        labels = self._cfg.actor.node_labels
        return [self._options(self._device, RANKS, i, 1, env, labels) for i in self._bundles_of_ranks()]

    def _bundles_of_ranks(self) -> list[int]:
        """Returns the bundle of each rank, for the current nodes of the bundles."""
        count = self._cfg.actor.num_workers
        node_of = self._nodes_of_ranks()
        if not node_of:
            return [0] * count
        per_bundle = count // len(node_of)
        order = in_order(node_of, math.lcm(num_shards(self._cfg), per_bundle) // per_bundle)
        return [bundle for bundle in order for _ in range(per_bundle)]

    def _nodes_of_ranks(self) -> Mapping[int, str]:
        """Returns the node of each bundle, empty on CPUs."""
        if (group := self._groups.get(RANKS)) is None:
            return {}
        limit = self._cfg.actor.start_timeout_s
        if not self._found(group, time.monotonic() + PLACED_S):
            self._warn(
                f"a node is gone, and the others have no {self._missing(group)} for its actor ranks; waiting "
                f"{limit:.0f} s (`actor.start_timeout_s`) for one that joins the Ray cluster"
            )
            with waiting("a node with room for actor ranks to join the Ray cluster"):
                found = self._found(group, time.monotonic() + limit)
            if not found:
                raise RuntimeError(
                    f"for {limit:g} s (`actor.start_timeout_s`) the Ray cluster had no {self._missing(group)} for "
                    "actor ranks whose node is gone; add a node to it"
                )
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        return nodes

    def _missing(self, group: PlacementGroup) -> str:
        places = placement_group_table(group)["bundles_to_node_id"].values()
        return f"{self._cfg.actor.num_workers * sum(not node for node in places) // len(places)} GPUs"

    def reward_model(self) -> list[dict[str, Any]]:
        model, device = self._cfg.reward.model, reward_model_device(self._cfg, self._device)
        env = {"TOKENIZERS_PARALLELISM": "false"}
        if device == "cpu":
            env |= _threads(model.cpu_threads)
        labels = model.node_labels
        return [self._options(device, REWARD_MODEL, i, model.num_gpus, env, labels) for i in range(model.num_workers)]

    def judges(self) -> list[dict[str, Any]]:
        engine, device = self._cfg.reward.judge.engine, judge_device(self._cfg, self._device)
        env, gpus = vllm_environment(device, engine.cpu_threads), gpus_per_engine(engine.vllm)
        places = range(engine.num_engines)
        return [self._options(device, _judge(i), 0, gpus, env, engine.node_labels) for i in places]

    def rewards(self) -> dict[str, Any]:
        """Returns the options of every reward worker: no GPU, and no CPU reserved, because verdicts are short."""
        return {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}

    def _options(
        self, device: str, group: str, bundle: int, gpus: float, env: dict[str, str], labels: Mapping[str, str]
    ) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": env | OWN_GPUS | fault_environment()}}
        if device == "cuda":
            options |= {
                "num_cpus": 1,
                "num_gpus": gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=self._groups[group], placement_group_bundle_index=bundle
                ),
            }
        elif labels:
            options["label_selector"] = dict(labels)
        return options


def vllm_environment(device: str, threads: int) -> dict[str, str]:
    env = {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **_threads(threads),
            "NUMBA_NUM_THREADS": "1",  # vLLM drafts in one thread; others would busy-wait
            "TORCHDYNAMO_DISABLE": "1",  # spares the inductor compile at start
            # AsyncLLM ignores this, but a CPU engine honours `uni` only under it: one process and one hop less.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return env


def _threads(count: int) -> dict[str, str]:
    """Returns the variables of a process that computes with `count` threads, with a short spin before idle threads
    sleep. Spinning threads of an engine that evaluates during an update take the cores that others need: both nearly
    stood still with two threads each on two cores. It costs an engine on its own a tenth of its speed."""
    return {"OMP_NUM_THREADS": str(count), "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000")}
