"""Decides where each role runs, and again where ranks lost their node.

In: the configuration and a joined cluster. Out: Ray options for every engine, actor rank and reward worker; before them
lines that say what was asked, what is there and what fits, or an error with the same for the pool that does not.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo.config.rules.decoding import on_device
from dapo.config.rules.engine import batches, stages
from dapo.config.schema import Config
from dapo.derived import gpus_per_engine, lends, lent_engines, num_shards, ranks_of_a_piece, shares_gpus, takes_turns
from dapo.faults.points import fault_environment
from dapo.report.watchdog import waiting
from workers.cluster import nodes
from workers.placing.asked import (
    CPUS_COLOCATED,
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
from workers.placing.fit import in_order, lines, placed, problems
from workers.placing.joining import POLL_S, nodes_with_room

COLOCATED_SHARE = 0.5  # of a GPU, as Ray counts it, for either role; memory is divided by gpu_memory_utilization
PLACED_S = 10.0  # in which Ray gives bundles of a lost node another place where there is one


def _bundles(cfg: Config, pool: Pool) -> dict[str, list[dict[str, float]]]:
    """Returns the bundles of each placement group of a pool, by its name: one group per engine, one per judge, one of
    all actor ranks, one of all copies of the reward model.

    A bundle lies on one node: that of the ranks holds all that share a sequence or an engine. Where the GPUs' memory is
    divided, it is one GPU, or Ray would give halves of one to two engines, and of another to two ranks; engine i shares
    bundle i.
    """
    whole: dict[str, float] = {"GPU": pool.gpus, "CPU": pool.cpus}
    if pool.name == ENGINES:
        return {_engine(number): [whole] for number in range(pool.count)}
    if pool.name == JUDGES:
        return {_judge(number): [whole] for number in range(pool.count)}
    if pool.name == REWARD_MODEL:
        return {pool.name: [{"GPU": cfg.reward.model.num_gpus, "CPU": 1}] * cfg.reward.model.num_workers}
    if cfg.trainer.colocate == "memory":
        return {pool.name: [{"GPU": 1, "CPU": CPUS_COLOCATED}] * cfg.actor.num_workers}
    return {pool.name: [whole] * pool.count}


def _engine(number: int) -> str:
    return f"engine {number}"


def _judge(number: int) -> str:
    return f"judge {number}"


class Placement:
    """Holds Ray options for each role: GPUs by placement groups on CUDA, thread counts on CPU.

    Ray finds the bundles of a node that is gone another place by itself, those of one group all or none, as soon as
    there is room. Groups of their own keep an engine that finds none from holding up the ranks.
    """

    def __init__(
        self,
        cfg: Config,
        device: str,
        *,
        warn: Callable[[str], None] = lambda line: None,
        say: Callable[[str], None] = lambda line: None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits until every role has a place. say: told what is asked, there, and fits; warn: what is waited for, now
        or later, when a node is gone. given_up: asked while it waits; then it waits no longer.

        Raises:
            ValueError: the cluster is too small, or no node has a pool's labels, also after `trainer.nodes_timeout_s`.
            RuntimeError: there was no place within `actor.start_timeout_s`.
        """
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
        """Makes the pool's placement groups; on CPUs there are none."""
        for name, bundles in _bundles(self._cfg, pool).items() if pool.gpus else ():
            labels = [dict(pool.labels)] * len(bundles) if pool.labels else None
            self._groups[name] = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)

    def give_up(self) -> None:
        """Ends every wait for a place, also one in another thread: nothing is to start any more."""
        self._given_up = lambda: True

    def _found(self, group: PlacementGroup, until: float) -> bool:
        """Waits for a group's place; False where it has none by `until` (`time.monotonic()`), or that is given up."""
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
        """Returns one entry per engine: those with GPUs of their own, then those on the ranks'."""
        env = vllm_environment(self._device, self._cfg.rollout.cpu_threads)
        count, labels = self._cfg.rollout.num_engines, self._cfg.rollout.node_labels
        gpus = gpus_per_engine(self._cfg.rollout.vllm)
        own, sharing = (
            (count, lent_engines(self._cfg)) if lends(self._cfg) or not shares_gpus(self._cfg) else (0, count)
        )
        share, labels_there = self._share, self._cfg.actor.node_labels
        bundles = [i * gpus // self._per_bundle for i in range(sharing)]
        return [
            *(self._options(self._device, _engine(i), 0, gpus, env, labels) for i in range(own)),
            *(self._options(self._device, RANKS, bundle, 1 - share, env, labels_there) for bundle in bundles),
        ]

    @property
    def _share(self) -> float:
        """Returns how much of its GPU Ray gives to a rank: all of it where an engine takes turns with it, to which Ray
        then gives none (`ranks_of_engine`)."""
        return COLOCATED_SHARE if self._cfg.trainer.colocate == "memory" else 1.0

    @property
    def _per_bundle(self) -> int:
        """Counts the ranks of a bundle."""
        return 1 if self._cfg.trainer.colocate == "memory" else ranks_of_a_piece(self._cfg)

    def ranks_of_engine(self, number: int) -> list[int]:
        """Returns the ranks whose GPUs an engine has in its turn; none on CPUs, or where it has GPUs of its own."""
        place = number - self._cfg.rollout.num_engines if lends(self._cfg) else number
        if self._device == "cpu" or not takes_turns(self._cfg) or place < 0:
            return []
        gpus, bundles = gpus_per_engine(self._cfg.rollout.vllm), self._bundles_of_ranks()
        bundle, first = divmod(place * gpus, self._per_bundle)
        return [rank for rank, of in enumerate(bundles) if of == bundle][first : first + gpus]

    def release_engine(self, number: int) -> None:
        """Gives the GPUs of an engine that is not started again back to the cluster, for whoever lost a node."""
        if group := self._groups.pop(_engine(number), None):
            remove_placement_group(group)

    def actors(self) -> list[dict[str, Any]]:
        """Returns one entry per FSDP rank: those that share a sequence are on one node, and those of a shard group as
        far as a node has room. Where a node is gone, waits until the cluster has room for its ranks.

        Raises:
            RuntimeError: it has none within `actor.start_timeout_s`.
        """
        env = {"TOKENIZERS_PARALLELISM": "false"}
        if self._device == "cpu":
            env |= _threads(self._cfg.actor.cpu_threads)
        share, labels = self._share, self._cfg.actor.node_labels
        return [self._options(self._device, RANKS, i, share, env, labels) for i in self._bundles_of_ranks()]

    def _bundles_of_ranks(self) -> list[int]:
        """Returns the bundle of each rank, by what is on which node now."""
        size, count = self._cfg.actor.ulysses_sequence_parallel_size, self._cfg.actor.num_workers
        node_of = self._nodes_of_ranks()
        if not node_of:
            return [0] * count
        per_bundle = count // len(node_of)
        order = in_order(node_of, math.lcm(size, num_shards(self._cfg), per_bundle) // per_bundle)
        found = [bundle for bundle in order for _ in range(per_bundle)]
        for first in range(0, count, size):
            if (many := len({node_of[bundle] for bundle in found[first : first + size]})) > 1:
                raise RuntimeError(
                    f"actor ranks {first} to {first + size - 1} share their sequences "
                    f"(`actor.ulysses_sequence_parallel_size` {size}), and Ray found them places on {many} nodes; "
                    "lower that key, or start when no other job holds GPUs of these nodes"
                )
        return found

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
        """Returns one entry per copy of the reward model."""
        model, device = self._cfg.reward.model, reward_model_device(self._cfg, self._device)
        env = {"TOKENIZERS_PARALLELISM": "false"}
        if device == "cpu":
            env |= _threads(model.cpu_threads)
        labels = model.node_labels
        return [self._options(device, REWARD_MODEL, i, model.num_gpus, env, labels) for i in range(model.num_workers)]

    def judges(self) -> list[dict[str, Any]]:
        """Returns one entry per judge of the run's own."""
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
    """Returns the variables of a process that runs vLLM. threads: on a CPU."""
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
            "NUMBA_NUM_THREADS": "1",  # vLLM drafts in one, and more of them wait for it by computing
            "TORCHDYNAMO_DISABLE": "1",  # spares the inductor compile at start
            # AsyncLLM ignores this, but a CPU engine honours `uni` only under it: one process and one hop less.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return env


def _threads(count: int) -> dict[str, str]:
    """Returns the variables of a process that computes with `count` threads, which soon sleep where they wait for one
    another: those of an engine that evaluates beside an update would else take the cores that the others need, and
    both stood nearly still (two threads each on two cores). It costs an engine on its own a tenth."""
    return {"OMP_NUM_THREADS": str(count), "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000")}
