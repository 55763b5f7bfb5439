"""Further nodes of a test's Ray cluster: raylets of their own on this machine, with GPUs that are not there."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import psutil
import ray
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group_table, remove_placement_group

from dapo.config.schema import Config
from dapo.workers.placement import Placement
from dapo.workers.placing.asked import RANKS
from tests.support.cluster import cluster_address

JOINED_S = 240.0
OBJECT_STORE_BYTES = 100 << 20


_addresses = itertools.count(2)


class Node:
    """A node that has joined the cluster of this process. within: the command that starts it in a world of its own.
    id: Ray's."""

    def __init__(self, gpus: int, within: Sequence[str] = ()) -> None:
        self._within = within
        deadline, found = time.monotonic() + JOINED_S, []
        self._start(gpus)
        while not found:
            assert time.monotonic() < deadline, "the node did not join"
            if self._process.poll() is not None:  # Ray gives up on an agent that a busy machine starts too slowly
                self._start(gpus)
            time.sleep(0.2)
            found = [each for each in ray.nodes() if each["NodeName"] == self._name and each["Alive"]]
        self.id: str = found[0]["NodeID"]

    def _start(self, gpus: int) -> None:
        self._name = uuid4().hex
        self._process = subprocess.Popen(
            [
                *self._within,
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
                *(f"--address={cluster_address()}", f"--node-name={self._name}"),
                f"--node-ip-address=127.0.0.{next(_addresses)}",  # else the name of loopback by which it joins
                *("--num-cpus=8", f"--num-gpus={gpus}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tell(self, seconds: float) -> None:
        """That it goes, as a notice of its machine does."""
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        at_ms = int((time.time() + seconds) * 1000)
        accepted, why = GcsClient(address=cluster_address()).drain_node(self.id, reason, "told", at_ms, timeout=30)
        assert accepted, why

    def kill(self) -> None:
        """Ends its raylet, and with it whatever runs there, as a machine that loses power."""
        [raylet] = [each for each in psutil.Process(self._process.pid).children() if each.name() == "raylet"]
        raylet.kill()

    def stop(self) -> None:
        """Ends all of it, and waits until the cluster knows: what starts next is placed on no node that is gone."""
        self._process.terminate()
        try:
            self._process.wait(timeout=JOINED_S)
        finally:
            self._process.kill()
        deadline = time.monotonic() + JOINED_S
        while any(each["NodeID"] == self.id and each["Alive"] for each in ray.nodes()):
            assert time.monotonic() < deadline, "the cluster keeps a node that has ended"
            time.sleep(0.2)


class OnNodes(Placement):
    """Places engines and ranks by GPUs that are not there, and lets them compute on the CPU."""

    def __init__(self, cfg: Config, device: str, **how: Any) -> None:
        super().__init__(replace(cfg, model=replace(cfg.model, dtype="bfloat16")), "cuda", **how)
        self._on_cpu = Placement(cfg, device)

    def node_of_ranks(self) -> set[str]:
        """Ids of the nodes of the ranks' bundles."""
        return set(placement_group_table(self._groups[RANKS])["bundles_to_node_id"].values())

    def free(self) -> None:
        """For the next run of this process; a program's places are free when it ends."""
        for group in self._groups.values():
            remove_placement_group(group)

    def rollout(self) -> list[dict[str, Any]]:
        return _merged(self._on_cpu.rollout(), super().rollout())

    def another(self) -> tuple[dict[str, Any], Callable[[int], None]]:
        placed, own = super().another()
        return _merged([self._on_cpu.another()[0]], [placed])[0], own

    def actors(self) -> list[dict[str, Any]]:
        return _merged(self._on_cpu.actors(), super().actors())


def _merged(on_cpu: list[dict[str, Any]], placed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [there | {"runtime_env": here["runtime_env"]} for here, there in zip(on_cpu, placed, strict=True)]
