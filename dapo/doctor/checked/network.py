"""Checks what RDMA between nodes requires: libibverbs, device files, and lockable memory. Runs on every node; needs
only the standard library."""

import ctypes
import os
import resource
from pathlib import Path

from dapo.doctor.checked.devices import seen_gpus
from dapo.doctor.finding import Finding, fault, ok, warning
from dapo.doctor.question import Question
from dapo.plan.terms import size

DEVICES, FILES = Path("/sys/class/infiniband"), Path("/dev/infiniband")
VERBS = "libibverbs.so.1"  # the name that NCCL loads
STATUS = Path("/proc/self/status")
IPC_LOCK = 1 << 14  # capability bit; with it any amount may be locked
MIN_LOCKED_BYTES = 4 << 30  # an estimate: NCCL registers buffers per connection
NOT_WANTED = (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket"))


def rdma_devices() -> list[str]:
    """Returns this node's InfiniBand, RoCE and EFA devices; empty if NCCL is configured not to use them."""
    if any(os.environ.get(name) == value for name, value in NOT_WANTED) or not DEVICES.is_dir():
        return []
    return sorted(each.name for each in DEVICES.iterdir())


def rdma(question: Question) -> Finding:
    """If something is missing, NCCL silently uses TCP: a fault if other nodes have GPUs too, else a warning."""
    devices = rdma_devices()
    if not devices:
        return ok("no InfiniBand, RoCE or EFA device, or NCCL is told to do without")
    gpus = len(seen_gpus()) if question.gpus else 0
    if not gpus:
        return ok("no GPU here that this run would use")
    found = f"{len(devices)} RDMA devices ({devices[0]} ...)" if devices[1:] else f"RDMA device {devices[0]}"
    apart = question.cluster_gpus > gpus
    short = fault if apart else warning
    try:
        ctypes.CDLL(VERBS)
    except OSError as error:
        return short(
            f"{found}, and {VERBS} cannot be loaded ({error}): NCCL takes TCP between nodes",
            "apt-get install libibverbs1 ibverbs-providers (dnf: libibverbs), or the image of docker/Dockerfile; "
            "NCCL_IB_DISABLE=1 where TCP is meant",
        )
    if not FILES.is_dir():
        missing = f"{found}, and no {FILES}"
        if not apart:
            return ok(f"{missing}: this container reaches no other node by it")
        return fault(
            f"{missing}: NCCL takes TCP between nodes",
            f"give the container the devices (--device={FILES}, in Kubernetes the component launch/kubernetes/rdma)",
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY or _may_lock()
    if not unlimited and locked < MIN_LOCKED_BYTES:
        return short(
            f"{found}, and {size(locked)} of memory may be locked (RLIMIT_MEMLOCK): NCCL cannot register its buffers",
            "`ulimit -l unlimited` before Ray starts, --ulimit memlock=-1 of the container; in Kubernetes "
            "LimitMEMLOCK=infinity for containerd on the nodes (IPC_LOCK has no effect for a user that is not root)",
        )
    return ok(f"{found}, {VERBS}, {'any amount' if unlimited else size(locked)} of memory may be locked")


def _may_lock() -> bool:
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return any(int(line.split()[1], 16) & IPC_LOCK for line in lines if line.startswith("CapEff:"))
