"""Runs checks on the nodes of a Ray cluster, one task per node and one per GPU."""

import copy
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dapo.config.derived import halve_roles
from dapo.config.schema import Config
from dapo.ground.watchdog import waiting
from dapo.tools.doctor.machines import CPU_RANKS, Silent, ThisMachine, called
from dapo.tools.doctor.network import LIMIT_S, Ring, measure
from dapo.workers.cluster import connect, leave, nodes
from dapo.workers.placing.asked import OWN_GPUS, pools
from dapo.workers.placing.fit import Node, lines, problems
from dapo.workers.training.processes import free_address

ANSWER_S = 120.0  # covers start and imports of a worker process, plus 60 s for the hub's and nvidia-smi's timeouts


class RayNodes(ThisMachine):
    """The nodes that are alive when it is created."""

    def __init__(self, address: str) -> None:
        """Joins the cluster. Raises OSError, ValueError or RuntimeError if there is none, or it refuses."""
        with waiting("Ray to be joined"):
            connect(address, worker_logs=False)
        own = ray.get_runtime_context().get_node_id()
        alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != own)
        self._ids = {f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}": node["NodeID"] for node in alive}
        gpus = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in alive}
        self._gpus = {name: gpus[identity] for name, identity in self._ids.items()}
        self.names = [*self._ids]

    def ask(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        return _answers([self._start(name, call, args)], ANSWER_S)[0]

    def ask_all(self, call: Callable[..., Any], *args: Any) -> dict[str, Any]:
        refs = [self._start(name, call, args) for name in self.names]
        return dict(zip(self.names, _answers(refs, ANSWER_S), strict=True))

    def gpus(self) -> int:
        return sum(self._gpus.values())

    def having_gpus(self) -> int:
        return sum(count > 0 for count in self._gpus.values())

    def all_reduce(self, device: str) -> list[Any]:
        """Starts one task per rank; each sees one GPU."""
        ranks = [name for name in self.names for _ in range(self._gpus[name] if device == "cuda" else 1)]
        ranks = ranks * CPU_RANKS if len(ranks) == 1 and device == "cpu" else ranks
        if not ranks:
            return []
        address = self.ask(ranks[0], free_address)
        if isinstance(address, Silent):
            return [address]
        host, port = address
        options = {"num_gpus": 1, "runtime_env": {"env_vars": OWN_GPUS}} if device == "cuda" else {}
        rings = [Ring(rank, len(ranks), host, port, device, 0) for rank in range(len(ranks))]
        refs = [self._start(name, measure, (ring,), **options) for name, ring in zip(ranks, rings, strict=True)]
        return _answers(refs, LIMIT_S)

    def _start(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
        there = NodeAffinitySchedulingStrategy(node_id=self._ids[name], soft=False)
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(called)
        return remote.options(scheduling_strategy=there, **options).remote(call, args)

    def close(self) -> None:
        leave()


def fitting(cfg: Config, machines: ThisMachine) -> str:
    """Returns the roles' GPU requests and the available GPUs, as text. Raises ValueError if they do not fit."""
    gpus, many = machines.gpus(), float("inf")
    there = nodes() if isinstance(machines, RayNodes) else [Node(gpus, many, gpus, many, {})]
    half = copy.deepcopy(cfg)
    halve_roles(half)
    asked = pools(half, "cuda")
    if found := problems(asked, there):
        raise ValueError("; ".join(found))
    return "; ".join(line.strip() for line in lines(asked, there)).removeprefix("placement: ")


def _answers(refs: list[Any], limit_s: float) -> list[Any]:
    """Returns results in order, a `Silent` for each that failed or missed the deadline; late tasks are cancelled."""
    deadline = time.monotonic() + limit_s
    found: list[Any] = []
    for ref in refs:
        try:
            found.append(ray.get(ref, timeout=max(0.1, deadline - time.monotonic())))
        except ray.exceptions.GetTimeoutError:
            with suppress(ray.exceptions.RayError):
                ray.cancel(ref, force=True)
            found.append(Silent(f"no answer within {limit_s:g} s"))
        except Exception as error:  # the node is lost, or has no or another dapo: many types
            lines = str(error).strip().splitlines() or [type(error).__name__]
            found.append(Silent(lines[-1].strip()))
    return found
