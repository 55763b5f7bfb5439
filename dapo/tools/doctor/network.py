"""Checks of the network between nodes: what RDMA requires (libibverbs, device files, lockable memory), on every node,
and an all-reduce between ranks as the actors do it, with gloo on CPUs and NCCL on GPUs.

`python -m dapo.tools.doctor.network JSON` runs one rank (JSON: the fields of `Ring`) and prints its `Measured` as JSON.
"""

import ctypes
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from dapo.config.node_environment import sockets_towards
from dapo.tools.doctor.software import MAX_NAMED, seen_gpus
from dapo.tools.doctor.subject import Finding, Question, Subject, fault, ok, warning
from dapo.tools.plan.terms import size

DEVICES, FILES = Path("/sys/class/infiniband"), Path("/dev/infiniband")
VERBS = "libibverbs.so.1"  # the name that NCCL loads
STATUS = Path("/proc/self/status")
IPC_LOCK = 1 << 14  # capability bit; with it any amount may be locked
MIN_LOCKED_BYTES = 4 << 30  # an estimate: NCCL registers buffers per connection
NOT_WANTED = (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket"))
START_S, LIMIT_S = 60.0, 90.0  # timeouts: process group setup; the whole check
CPU_BYTES, GPU_BYTES = 16 << 20, 1 << 30  # with smaller tensors a large ring would measure latency
ROUNDS = 3  # the first one warms up
SLOW_SHARE, BROKEN_SHARE = 1 / 3, 1 / 10  # of the bandwidth that the planner assumes: a warning, a fault
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
SOCKETS = "Socket"  # NCCL's name for TCP


def rdma_devices() -> list[str]:
    """Returns this node's InfiniBand, RoCE and EFA devices; empty if NCCL is configured not to use them."""
    if any(os.environ.get(name) == value for name, value in NOT_WANTED) or not DEVICES.is_dir():
        return []
    return sorted(each.name for each in DEVICES.iterdir())


def rdma(question: Question) -> Finding:
    """If something is missing, NCCL silently uses TCP between nodes with GPUs."""
    devices, gpus = rdma_devices(), len(seen_gpus()) if question.gpus else 0
    if not devices or not gpus or question.cluster_gpus <= gpus:
        return ok("no RDMA device that NCCL would use, or no GPUs on two nodes that this run would use")
    found, lacks = f"RDMA devices {', '.join(devices[:MAX_NAMED])}", dict[str, str]()
    try:
        ctypes.CDLL(VERBS)
    except OSError:
        lacks[f"{VERBS} cannot be loaded"] = "apt-get install libibverbs1 ibverbs-providers, or docker/Dockerfile"
    if not FILES.is_dir():
        lacks[f"no {FILES}"] = f"give the container --device={FILES}, in Kubernetes launch/kubernetes/rdma"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < MIN_LOCKED_BYTES and not _may_lock():
        lacks[f"{size(locked)} of memory may be locked (RLIMIT_MEMLOCK)"] = (
            "`ulimit -l unlimited` before Ray starts, --ulimit memlock=-1 of the container; in Kubernetes "
            "LimitMEMLOCK=infinity for containerd on the nodes"
        )
    if not lacks:
        return ok(f"{found}, {VERBS}")
    return fault(
        f"{found}; {'; '.join(lacks)}: NCCL takes TCP between nodes",
        f"{'; '.join(lacks.values())}; NCCL_IB_DISABLE=1 where TCP is meant",
    )


def _may_lock() -> bool:
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return any(int(line.split()[1], 16) & IPC_LOCK for line in lines if line.startswith("CapEff:"))


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
        seconds = _seconds(ring)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return Measured(seconds, network_of(text), rdma_devices())


def network_of(log: str) -> str:
    """Returns the network named in NCCL's log: IB (also for RoCE), Socket, or a plugin's name."""
    found = re.findall(r"Using network (.+)", log)
    return found[-1].strip() if found else ""


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
            if not torch.all(values == ring.world):
                raise RuntimeError(f"the sum of {ring.world} ranks' ones is wrong")
        return best
    finally:
        dist.destroy_process_group()


def all_reduce(subject: Subject, machines: Any) -> Finding:
    device = "cuda" if subject.uses_gpus and machines.gpus() else "cpu"
    count = machines.having_gpus() if device == "cuda" else len(machines.names)
    return judged(machines.all_reduce(device), device, count, subject.cfg.plan.network_bandwidth)


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
    using = "".join(f" by {name}" for name in sorted({one.network for one in those} - {""}))
    found = f"{where}: {size(bandwidth)}/s{using}"
    if device != "cuda" or machines == 1:
        return ok(found)
    see = "see the line `RDMA`, and which devices NCCL_IB_HCA and NCCL_SOCKET_IFNAME name"
    if shunned := sorted({name for one in those if one.network == SOCKETS for name in one.devices}):
        return fault(f"{found}; NCCL uses TCP beside {', '.join(shunned[:MAX_NAMED])}", see)
    expected = assumed * world / machines
    if bandwidth < SLOW_SHARE * expected:
        slow = fault if bandwidth < BROKEN_SHARE * expected else warning
        return slow(f"{found}, and the planner assumes {size(expected)}/s (`plan.network_bandwidth` x GPUs)", see)
    return ok(found)


if __name__ == "__main__":
    print(json.dumps(measure(Ring(*json.loads(sys.argv[1])))))
