"""Waits, up to a time limit, for nodes that are still to join the Ray cluster."""

import time
from collections.abc import Callable, Sequence

from ray.autoscaler.sdk import request_resources

from dapo.ground.watchdog import waiting
from dapo.workers.placing.asked import Pool
from dapo.workers.placing.fit import Node, problems, shapes

POLL_S = 1.0
KEY = "trainer.nodes_timeout_s"


def nodes_with_room(
    pools: Sequence[Pool],
    nodes: Callable[[], list[Node]],
    timeout_s: float,
    *,
    warn: Callable[[str], None],
    given_up: Callable[[], bool],
) -> list[Node]:
    """Returns the cluster's nodes once they could hold the pools, or as they are after `timeout_s`. Meanwhile requests
    the resources from Ray's autoscaler, if any. nodes: returns the current nodes. given_up: returns whether to stop
    waiting."""
    there = nodes()
    if not timeout_s or not problems(pools, there):
        return there
    warn(f"the Ray cluster, {shapes(there)}, is too small; waiting up to {timeout_s:g} s (`{KEY}`) for more")
    wanted = [pool for pool in pools for _ in range(pool.count) if pool.gpus]
    bundles, labels = [{"GPU": pool.gpus, "CPU": pool.cpus} for pool in wanted], [dict(pool.labels) for pool in wanted]
    request_resources(bundles=bundles, bundle_label_selectors=labels)
    deadline = time.monotonic() + timeout_s
    try:
        with waiting("nodes to join the Ray cluster"):
            while problems(pools, there) and time.monotonic() < deadline and not given_up():
                time.sleep(POLL_S)
                there = nodes()
    finally:
        request_resources(bundles=[])  # withdraws the request; from now on nodes are kept by what uses them
    return there
