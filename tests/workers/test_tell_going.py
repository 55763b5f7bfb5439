"""`dapo leave` on a real Ray node."""

import os
import subprocess
import sys
import time

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dapo.workers.own_cluster import TOKEN
from tests.support.cluster import cluster_address
from tests.support.nodes import Node

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(400)]
IN_S = 60


def leave(**env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dapo.leave", str(IN_S)]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


def test_a_node_that_is_told_to_go_keeps_its_actors_until_they_end(ray_cluster: None) -> None:
    """Ray ends the node then. The head's own, which is on this machine too, is left alone."""
    node = Node(gpus=1)
    try:
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        worker = ray.remote(num_cpus=0)(Worker).options(scheduling_strategy=there).remote()
        assert ray.get(worker.node.remote(), timeout=60) == node.id

        for env, said in (
            ({TOKEN: "b" * 64}, "token"),
            ({TOKEN: ""}, "token"),
            ({"RAY_ADDRESS": "127.0.0.1:1"}, "RAY_ADDRESS"),
        ):
            refused = leave(**{"RAY_ADDRESS": cluster_address(), **env})
            last = refused.stderr.splitlines()[-1]  # after Ray's own
            assert refused.returncode == 1 and last.startswith("error: ") and said in last, refused.stderr
        assert ray._private.state.state.get_draining_nodes() == {}

        began = time.time()
        told = leave(RAY_ADDRESS=cluster_address())
        assert told.returncode == 0 and f"goes in {IN_S} s ({node.id[:6]})" in told.stdout, told.stderr
        [(going, at_ms)] = ray._private.state.state.get_draining_nodes().items()
        assert going == node.id and began + IN_S - 1 <= at_ms / 1000 <= time.time() + IN_S

        assert ray.get(worker.node.remote(), timeout=60) == node.id
        ray.kill(worker)
        deadline = time.monotonic() + 60
        while ray._private.state.state.get_draining_nodes():
            assert time.monotonic() < deadline, "an empty node stays"
            time.sleep(0.1)
    finally:
        node.stop()


class Worker:
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()
