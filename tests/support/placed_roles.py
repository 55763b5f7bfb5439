"""A Ray cluster with GPUs that are not there, and which of them each role gets; for a process without Ray."""

import ray

from dapo.config.schema import Config
from workers.cluster import Placement


class Role:
    def gpus(self) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def gpus_of_roles(cfg: Config, num_gpus: int) -> dict[str, list[list[str]]]:
    """Returns the GPUs that Ray has given to each worker of each role."""
    ray.init(address="local", num_cpus=8, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False)
    try:
        placement = Placement(cfg, "cuda")
        roles = {"engines": placement.rollout(), "actors": placement.actors(), "scorer": placement.reward_model()}
        workers = {role: [ray.remote(Role).options(**each).remote() for each in all] for role, all in roles.items()}
        return {role: ray.get([each.gpus.remote() for each in all], timeout=300) for role, all in workers.items()}
    finally:
        ray.shutdown()
