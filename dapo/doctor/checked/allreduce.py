"""Measures an all-reduce between ranks, as the actors will do it: gloo on CPUs, NCCL on GPUs.

In: a rank's place in a ring. Out: seconds of the fastest of a few, after it was checked that the sums are right.
As a program (`python -m dapo.doctor.checked.allreduce JSON`) it is one rank, and prints them as JSON.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from dapo.doctor.finding import Finding, fault, ok, warning
from dapo.interfaces import gloo_towards
from dapo.plan.terms import size

START_S, LIMIT_S = 60.0, 90.0  # for the ranks to find each other; for all of it
CPU_BYTES, GPU_BYTES = 16 << 20, 256 << 20
ROUNDS = 4  # the first one warms up
SLOW_SHARE = 0.1  # of the bandwidth that the planner assumes


@dataclass(frozen=True, slots=True)
class Ring:
    """Holds the place of one rank. gpu: its number among those that the process sees."""

    rank: int
    world: int
    host: str
    port: int
    device: str
    gpu: int


def measure(ring: Ring) -> float:
    """Returns seconds. Raises RuntimeError where ranks do not find each other in time, or a sum is wrong."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", ring.gpu) if ring.device == "cuda" else torch.device("cpu")
    if ring.device == "cuda":
        torch.cuda.set_device(device)
    gloo_towards(ring.host)
    dist.init_process_group(
        "nccl" if ring.device == "cuda" else "gloo",
        init_method=f"tcp://{ring.host}:{ring.port}",
        rank=ring.rank,
        world_size=ring.world,
        timeout=timedelta(seconds=START_S),
    )
    try:
        count, best = bytes_of(ring.device) // 4, float("inf")
        for _ in range(ROUNDS):
            values = torch.ones(count, device=device)
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(values)
            values[0].item()  # waits for the device
            best = min(best, time.perf_counter() - began)
            smallest, largest = values.min().item(), values.max().item()
            if (smallest, largest) != (ring.world, ring.world):
                raise RuntimeError(f"the sum of {ring.world} ranks' ones is {smallest} to {largest}")
        return best
    finally:
        dist.destroy_process_group()


def bytes_of(device: str) -> int:
    """Returns the size of the tensor that is summed."""
    return GPU_BYTES if device == "cuda" else CPU_BYTES


def judged(measured: Sequence[object], device: str, machines: int, assumed: float) -> Finding:
    """Returns the verdict. measured: seconds, or why there are none, by rank. assumed: bytes per second that a GPU
    receives, as the planner counts them."""
    backend = "NCCL" if device == "cuda" else "gloo"
    world, seconds = len(measured), [one for one in measured if isinstance(one, float)]
    where = f"{backend}, {world} ranks on {machines} {'machines' if machines > 1 else 'machine'}"
    if len(seconds) < world:
        reasons = sorted({str(one) for one in measured if not isinstance(one, float)})
        return fault(
            f"{where}: {'; '.join(reasons)[:400]}",
            "name the network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), open the ports between the nodes, "
            "and see NCCL_DEBUG=INFO",
        )
    bandwidth = 2 * (world - 1) / world * bytes_of(device) / max(seconds)
    found = f"{where}: {size(bandwidth)}/s ({bytes_of(device) >> 20} MiB in {max(seconds) * 1000:.0f} ms)"
    if device == "cuda" and machines > 1 and bandwidth < SLOW_SHARE * assumed:
        return warning(
            f"{found}, and the planner assumes {size(assumed)}/s (`plan.network_bandwidth`)",
            "NCCL may use TCP in place of InfiniBand or RoCE: see NCCL_DEBUG=INFO, NCCL_IB_HCA, ulimit -l unlimited",
        )
    return ok(found)


if __name__ == "__main__":
    print(json.dumps(measure(Ring(*json.loads(sys.argv[1])))))
