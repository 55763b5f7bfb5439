"""Ray clusters with GPUs that are not there, and where each role gets which of them; for a process without Ray."""

from dataclasses import replace
from typing import Any

import ray
from ray.cluster_utils import Cluster

from dapo.config.schema import Config
from workers.placement import Placement

ANSWER_S = 300.0


def make_config(engines: int, tensor_parallel: int, actors: int) -> Config:
    cfg = Config()
    cfg.rollout.num_engines, cfg.actor.num_workers = engines, actors
    cfg.rollout.vllm = {"tensor_parallel_size": tensor_parallel}
    return cfg


def colocated(gpus: int) -> Config:
    cfg = make_config(gpus, 1, gpus)
    cfg.trainer.colocate = "memory"
    return cfg


class Role:
    def gpus(self) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    def place(self) -> tuple[str, list[str]]:
        return ray.get_runtime_context().get_node_id(), self.gpus()


def started(options: list[dict[str, Any]]) -> list[Any]:
    return [ray.remote(Role).options(**each).remote() for each in options]


def gpus_of_roles(cfg: Config, num_gpus: int) -> dict[str, list[list[str]]]:
    """Returns the GPUs that Ray has given to each worker of each role; `owned`: those of the ranks of each engine."""
    ray.init(address="local", num_cpus=16, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False)
    try:
        placement = Placement(cfg, "cuda")
        roles = {"engines": placement.rollout(), "actors": placement.actors(), "scorer": placement.reward_model()}
        workers = {role: started(options) for role, options in roles.items()}
        gpus = {role: ray.get([each.gpus.remote() for each in all], timeout=ANSWER_S) for role, all in workers.items()}
        ranks = [placement.ranks_of_engine(number) for number in range(len(roles["engines"]))]
        return gpus | {"owned": [[gpu for rank in own for gpu in gpus["actors"][rank]] for own in ranks]}
    finally:
        ray.shutdown()


def places_of_roles(cfg: Config) -> dict[str, Any]:
    """Returns node and GPUs of each worker on two nodes `train` of 3 GPUs and one `serve` of 2, what was told, what is
    said where no node has a label, and the places of the ranks when one of the former is replaced by one of 2.

    By names: `a` and `b` of the first two, `c` that joins when it is waited for, and `d` that comes later.
    """
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        shape = {"a": (3, "train"), "b": (3, "train"), "c": (2, "serve"), "d": (2, "train")}
        made = {name: _add(cluster, *shape[name]) for name in "ab"}
        told: list[str] = []
        found: dict[str, Any] = {"told": told}

        def join(line: str) -> None:
            told.append(line)
            made["c"] = _add(cluster, *shape["c"])

        waits = replace(cfg, trainer=replace(cfg.trainer, nodes_timeout_s=ANSWER_S))
        placement = Placement(waits, "cuda", say=told.append, warn=join)
        ranks = started(placement.actors())
        found["engines"] = _places(started(placement.rollout()), made)
        found["ranks"] = _places(ranks, made)
        try:
            Placement(replace(cfg, actor=replace(cfg.actor, node_labels={"pool": "tarin"})), "cuda")
        except ValueError as error:
            found["refused"] = str(error)
        cluster.remove_node(made["b"])
        made["d"] = _add(cluster, *shape["d"])
        for rank in ranks:
            ray.kill(rank)
        found["ranks later"] = _places(started(placement.actors()), made)
        return found
    finally:
        ray.shutdown()
        cluster.shutdown()


def _add(cluster: Cluster, gpus: int, pool: str) -> Any:
    return cluster.add_node(num_cpus=8, num_gpus=gpus, labels={"pool": pool})


def _places(workers: list[Any], made: dict[str, Any]) -> list[tuple[str, list[str]]]:
    names = {node.node_id: name for name, node in made.items()}
    answers = ray.get([worker.place.remote() for worker in workers], timeout=ANSWER_S)
    return [(names[node], gpus) for node, gpus in answers]
