"""Checks of limits of the operating system and the container: files, processes, shared memory, temporary disk. Run on
every node; needs only the standard library and psutil."""

import os
import resource
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from dapo.tools.doctor.subject import Finding, Question, fault, ok, warning
from dapo.tools.plan.terms import size

# Estimates. Less is a fault for a run on GPUs, and a warning for one on CPUs, which may be small.
MIN_FILES = 4096
MIN_THREADS = 4096  # a node with Ray, engines and ranks: about 60 per process
MIN_SHARED_BYTES = 512 << 20  # Docker's default is 64 MiB; Ray works with that, NCCL does not
MIN_TEMPORARY_BYTES = 2 << 30  # Ray's session
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def open_files(question: Question) -> Finding:
    """Checks RLIMIT_NOFILE. `ray.init` raises the soft limit to the hard limit for the driver and the nodes that it
    starts; nodes that already run keep theirs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if question.driver else soft
    remedy = "`ulimit -n 65536` before Ray starts, or LimitNOFILE, --ulimit nofile=65536 of the container"
    enough = limit == resource.RLIM_INFINITY or limit >= MIN_FILES
    return _compared(question, enough, f"limit of {limit} open files", f"{MIN_FILES}", remedy)


def processes(question: Question) -> Finding:
    """Checks how many more threads may start: RLIMIT_NPROC of the user, pids.max of the container."""
    (soft, _), pids = resource.getrlimit(resource.RLIMIT_NPROC), cgroup("pids.max")
    left = {}
    if pids is not None:
        left["`pids.max` of the container (--pids-limit)"] = pids - (cgroup("pids.current") or 0)
    if soft != resource.RLIM_INFINITY:
        left["`ulimit -u`"] = soft - _own_threads()
    if not left:
        return ok("no limit of processes")
    key = min(left, key=left.__getitem__)
    return _compared(
        question, left[key] >= MIN_THREADS, f"{left[key]} more threads ({key})", f"{MIN_THREADS}", f"raise {key}"
    )


def shared_memory(question: Question) -> Finding:
    """Checks /dev/shm, which Ray's object store, NCCL and vLLM's processes share."""
    total = shutil.disk_usage("/dev/shm").total
    remedy = "run the container with --shm-size=32g (or --ipc=host; in Kubernetes an emptyDir of medium Memory)"
    enough = total >= MIN_SHARED_BYTES
    return _compared(question, enough, f"/dev/shm has {size(total)}", size(MIN_SHARED_BYTES), remedy)


def temporary_disk(question: Question) -> Finding:
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    remedy = "make room there, or name a directory on a local disk with room: RAY_TMPDIR, for launch/slurm NODE_DISK"
    enough = free >= MIN_TEMPORARY_BYTES
    return _compared(question, enough, f"{folder} has {size(free)} free", size(MIN_TEMPORARY_BYTES), remedy)


def _compared(question: Question, enough: bool, found: str, least: str, remedy: str) -> Finding:
    if enough:
        return ok(found)
    short = fault if question.gpus else warning
    return short(f"{found}, and Ray, engines and ranks need {least}", remedy)


def memory_bytes() -> int:
    """Returns the bytes of this machine's memory, or the container's limit if lower."""
    limit = cgroup("memory.max")
    total: int = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def cgroup(name: str) -> int | None:
    """Returns the smallest value of a cgroup v2 file over this process's cgroup and its parents; None: unlimited."""
    try:
        lines = OWN_CGROUPS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = []
    for own in (line.removeprefix("0::") for line in lines if line.startswith("0::")):
        for folder in ((group := CGROUPS / own.lstrip("/")), *group.parents):
            if folder.is_relative_to(CGROUPS):
                with suppress(OSError, ValueError):  # "max", or the root group, which has no limit files
                    found.append(int((folder / name).read_text(encoding="ascii")))
    return min(found, default=None)


def _own_threads() -> int:
    user, total = os.getuid(), 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or access is denied
            total += process.num_threads() if process.uids().real == user else 0
    return total
