"""Measures an all-reduce between ranks, as the actors will do it: gloo on CPUs, NCCL on GPUs.

`python -m dapo.doctor.checked.allreduce JSON` runs one rank (JSON: the fields of `Ring`) and prints its `Measured` as
JSON.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from dapo.doctor.checked.network import rdma_devices
from dapo.doctor.finding import Finding, fault, ok, warning
from dapo.node_environment import sockets_towards
from dapo.plan.terms import size

START_S, LIMIT_S = 60.0, 90.0  # timeouts: process group setup; the whole check
CPU_BYTES, GPU_BYTES = 16 << 20, 1 << 30  # with smaller tensors a large ring would measure latency
ROUNDS = 3  # the first one warms up
SLOW_SHARE, BROKEN_SHARE = 1 / 3, 1 / 10  # shares of the bandwidth that the planner assumes
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
SOCKETS = "Socket"  # NCCL's name for TCP
MAX_NAMED = 4


class Measured(NamedTuple):
    """Result of one rank. network: NCCL's name of its network between nodes; empty for gloo. devices: RDMA devices of
    the rank's machine."""

    seconds: float
    network: str = ""
    devices: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Ring:
    """Place of one rank. gpu: index among the GPUs visible to the process."""

    rank: int
    world: int
    host: str
    port: int
    device: str
    gpu: int


def measure(ring: Ring) -> Measured:
    """Returns the fastest of a few rounds, after checking the sums. Raises RuntimeError if ranks do not find each other
    in time, or a sum is wrong."""
    if ring.device != "cuda":
        return Measured(_seconds(ring))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        os.environ.update(LOG, NCCL_DEBUG_FILE=str(log))  # safe: this process only measures
        try:
            seconds = _seconds(ring)
        except Exception as error:
            raise RuntimeError("; NCCL: ".join([str(error), *warned(_text(log))[-1:]])) from error
        return Measured(seconds, network_of(_text(log)), rdma_devices())


def network_of(log: str) -> str:
    """Returns the network named in NCCL's log: IB (also for RoCE), Socket, or a plugin's name."""
    found = re.findall(r"Using network (.+)", log)
    return found[-1].strip() if found else ""


def warned(log: str) -> list[str]:
    return re.findall(r"NCCL WARN (.+)", log)


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def _seconds(ring: Ring) -> float:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", ring.gpu) if ring.device == "cuda" else torch.device("cpu")
    if ring.device == "cuda":
        torch.cuda.set_device(device)
    sockets_towards(ring.host)
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
            values[0].item()  # synchronizes with the device
            best = min(best, time.perf_counter() - began)
            smallest, largest = values.min().item(), values.max().item()
            if (smallest, largest) != (ring.world, ring.world):
                raise RuntimeError(f"the sum of {ring.world} ranks' ones is {smallest} to {largest}")
        return best
    finally:
        dist.destroy_process_group()


def bytes_of(device: str) -> int:
    return GPU_BYTES if device == "cuda" else CPU_BYTES


def judged(measured: Sequence[object], device: str, machines: int, assumed: float) -> Finding:
    """Returns the finding. measured: by rank, a `Measured` or the reason why there is none. assumed: bytes per second
    that one GPU receives from other nodes according to the planner; all GPUs of a node carry the ring together."""
    backend = "NCCL" if device == "cuda" else "gloo"
    world, those = len(measured), [one for one in measured if isinstance(one, Measured)]
    where = f"{backend}, {world} ranks on {machines} {'machines' if machines > 1 else 'machine'}"
    if len(those) < world:
        reasons = sorted({str(one) for one in measured if not isinstance(one, Measured)})
        return fault(
            f"{where}: {'; '.join(reasons)[:400]}",
            "name the network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), and open the ports between the nodes",
        )
    slowest = max(one.seconds for one in those)
    bandwidth = 2 * (world - 1) / world * bytes_of(device) / slowest
    networks = sorted({one.network for one in those} - {""})
    using = f" by {', '.join(networks)}" if networks else ""
    found = f"{where}: {size(bandwidth)}/s{using} ({bytes_of(device) >> 20} MiB in {slowest * 1000:.0f} ms)"
    if device != "cuda" or machines == 1:
        return ok(found)
    see = "see the line `RDMA`, and which devices NCCL_IB_HCA and NCCL_SOCKET_IFNAME name"
    if shunned := sorted({name for one in those if one.network == SOCKETS for name in one.devices}):
        return fault(
            f"{found}; NCCL uses TCP beside {', '.join(shunned[:MAX_NAMED])}",
            f"{see}; NCCL_IB_DISABLE=1 where TCP is meant",
        )
    expected = assumed * world / machines
    if bandwidth < SLOW_SHARE * expected:
        short = fault if bandwidth < BROKEN_SHARE * expected else warning
        return short(
            f"{found}, and the planner assumes {size(expected)}/s (`plan.network_bandwidth` x {world / machines:g} "
            "GPUs of a node)",
            f"{see}; set `plan.network_bandwidth` where the network has no more",
        )
    return ok(found)


if __name__ == "__main__":
    print(json.dumps(measure(Ring(*json.loads(sys.argv[1])))))
