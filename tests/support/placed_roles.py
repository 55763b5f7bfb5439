"""Ray clusters with GPUs that are not there, and where each role gets which of them; for a process without Ray."""

from dataclasses import replace
from typing import Any

import ray
from ray.cluster_utils import Cluster

from dapo.config.schema import Config
from dapo.workers.placement import Placement

ANSWER_S = 300.0


def make_config(
    engines: int, tensor_parallel: int, actors: int, sequence_parallel: int = 1, **labels: dict[str, str]
) -> Config:
    """labels: of the nodes of `rollout` and `actor`."""
    cfg = Config()
    cfg.rollout.num_engines, cfg.actor.num_workers = engines, actors
    cfg.rollout.vllm = {"tensor_parallel_size": tensor_parallel}
    cfg.actor.ulysses_sequence_parallel_size = sequence_parallel
    cfg.rollout.node_labels, cfg.actor.node_labels = labels.get("rollout", {}), labels.get("actor", {})
    return cfg


class Role:
    def place(self) -> tuple[str, list[str]]:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]


def started(options: list[dict[str, Any]]) -> list[Any]:
    return [ray.remote(Role).options(**each).remote() for each in options]


def answers(workers: list[Any]) -> list[tuple[str, list[str]]]:
    return ray.get([worker.place.remote() for worker in workers], timeout=ANSWER_S)


def gpus_of_roles(cfg: Config, num_gpus: int) -> dict[str, list[list[str]]]:
    """Returns the GPUs that Ray has given to each worker of each role; `owned`: those of the ranks of each engine."""
    ray.init(address="local", num_cpus=16, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False)
    try:
        placement = Placement(cfg, "cuda")
        roles = {"engines": placement.rollout(), "actors": placement.actors(), "scorer": placement.reward_model()}
        workers = {role: started(options) for role, options in roles.items()}
        gpus = {role: [gpus for _, gpus in answers(all)] for role, all in workers.items()}
        ranks = [placement.ranks_of_engine(number) for number in range(len(roles["engines"]))]
        return gpus | {"owned": [[gpu for rank in own for gpu in gpus["actors"][rank]] for own in ranks]}
    finally:
        ray.shutdown()


def places_of_roles(cfg: Config) -> dict[str, Any]:
    """Returns node and GPUs of each worker on two nodes `train` of 3 GPUs and one `serve` of 2, what was told, and the
    places of the ranks when one of the former is replaced by one of 2.

    By names: `a` and `b` of the first two, `c` that joins when it is waited for, and `d` that comes later.
    """
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        made: dict[str, Any] = {}
        told: list[str] = []
        found: dict[str, Any] = {"told": told}

        def add(name: str, gpus: int, pool: str) -> None:
            made[name] = cluster.add_node(num_cpus=8, num_gpus=gpus, labels={"pool": pool})

        def join(line: str) -> None:
            told.append(line)
            add("c", 2, "serve")

        def places(workers: list[Any]) -> list[tuple[str, list[str]]]:
            names = {node.node_id: name for name, node in made.items()}
            return [(names[node], gpus) for node, gpus in answers(workers)]

        add("a", 3, "train")
        add("b", 3, "train")
        waits = replace(cfg, trainer=replace(cfg.trainer, nodes_timeout_s=ANSWER_S))
        placement = Placement(waits, "cuda", say=told.append, warn=join)
        ranks = started(placement.actors())
        found["engines"] = places(started(placement.rollout()))
        found["ranks"] = places(ranks)
        cluster.remove_node(made["b"])
        add("d", 2, "train")
        for rank in ranks:
            ray.kill(rank)
        found["ranks later"] = places(started(placement.actors()))
        return found
    finally:
        ray.shutdown()
        cluster.shutdown()
