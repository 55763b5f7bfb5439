"""Joins or starts a Ray cluster, and sees what it has.

In: the address. Out: a process that can start workers there; nodes with their GPUs.
"""

import logging
import os
from contextlib import ExitStack, nullcontext
from typing import Any

import ray
from ray._common.utils import get_system_memory
from ray._private.state import available_resources_per_node

from workers.own_cluster import deaf_to_hangups, on_loopback, own_token
from workers.placing.fit import Node

GIB = 1 << 30
OWN_HEAD_S, HEAD_S = 5.0, 30.0  # Ray itself gives up after 60 s, and leaves no time to save

_own = ExitStack()  # what a cluster of our own has changed in this process


def connect(address: str, *, worker_logs: bool) -> None:
    """Joins the cluster at `address` (`auto`, host:port), or starts one on this machine, and for it alone, where it is
    `local` or where neither it nor RAY_ADDRESS is set. `leave` ends it.

    Raises:
        ValueError: the address is of Ray's client (`ray://`) or job server; a run is a process of a node.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    target = _target(address)
    local: dict[str, Any] = {}
    if target == "local":
        local = {"include_dashboard": False, "object_store_memory": _object_store_bytes()}
        _own.enter_context(own_token())
    try:
        with deaf_to_hangups(), on_loopback() if target == "local" else nullcontext():
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
    target = address or os.environ.get("RAY_ADDRESS", "local")
    if "://" in target:
        raise ValueError(
            f"`trainer.ray_address` or RAY_ADDRESS ({target}) is that of Ray's client or job server, and a run is a "
            "process on a node of the cluster: give HOST:PORT of the head, or `auto`, there, or hand the run over by "
            "`ray job submit --address http://HEAD:8265`"
        )
    return target


def head(address: str) -> tuple[str, float]:
    """Returns where Ray's head process takes connections, HOST:PORT, and for how many seconds it may take none.

    Nobody starts that of a cluster of our own again. address: as in `connect`, which comes first.
    """
    return ray.get_runtime_context().gcs_address, OWN_HEAD_S if _target(address) == "local" else HEAD_S


def _object_store_bytes() -> int:
    """Returns a fifth of the memory of the machine, or of the container, at most 8 GiB: the steps of a run on one
    machine fit many times over."""
    return min(get_system_memory() // 5, 8 * GIB)


def nodes() -> list[Node]:
    """Returns the nodes that are alive, with what nobody holds of them."""
    free = available_resources_per_node()
    found = []
    for each in ray.nodes():
        if each["Alive"]:
            there, left = each["Resources"], free.get(each["NodeID"], {})
            found.append(
                Node(
                    gpus=int(there.get("GPU", 0)),
                    cpus=there.get("CPU", 0.0),
                    free_gpus=left.get("GPU", 0.0),
                    free_cpus=left.get("CPU", 0.0),
                    labels=each["Labels"],
                )
            )
    return found
