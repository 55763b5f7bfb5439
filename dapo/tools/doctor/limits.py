"""Checks of limits of the operating system and the container: files, processes, shared memory, temporary disk. Run on
every node; needs only the standard library and psutil."""

import os
import resource
import shutil
import tempfile
from pathlib import Path

import psutil

from dapo.tools.doctor.subject import Finding, Question, fault, ok, warning
from dapo.tools.plan.terms import size

# Estimates. In each MIN/FEW pair, a GPU run fails below MIN. A CPU run, which may be small, gets a warning below MIN
# and fails below FEW.
MIN_FILES, FEW_FILES, FILES = 4096, 512, 8192  # Ray warns below MIN_FILES and recommends FILES
MIN_THREADS, FEW_THREADS = 4096, 1024  # a node with Ray, engines and ranks: about 60 per process
MIN_SHARED_BYTES = 512 << 20  # Docker's default is 64 MiB; Ray works with that, NCCL does not
GIB = 1 << 30
RAY_STOPS_SPILLING = 0.95  # share of a full disk
MIN_TEMPORARY_BYTES, FEW_TEMPORARY_BYTES = 2 * GIB, GIB // 2
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
FIRST_VERSION = {"memory.max": "memory.limit_in_bytes"}  # cgroup v1 names that differ from v2


def open_files(question: Question) -> Finding:
    """Checks RLIMIT_NOFILE. `ray.init` raises the soft limit to the hard limit for the driver and the nodes that it
    starts; nodes that already run keep theirs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if question.driver else soft
    found = f"{_limit(limit)} open files"
    remedy = f"`ulimit -n {8 * FILES}` before Ray starts, or LimitNOFILE, --ulimit nofile={8 * FILES} of the container"
    if limit != resource.RLIM_INFINITY and limit < MIN_FILES:
        short = fault if question.gpus or limit < FEW_FILES else warning
        return short(f"{found}, and Ray, engines and ranks need {MIN_FILES}", remedy)
    if limit != resource.RLIM_INFINITY and limit < FILES:
        return warning(f"{found}, and Ray recommends {FILES}", remedy)
    return ok(found)


def processes(question: Question) -> Finding:
    """Checks how many more threads may start: RLIMIT_NPROC of the user, pids.max of the container."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit, taken, key = cgroup("pids.max"), cgroup("pids.current"), "`pids.max` of the container (--pids-limit)"
    left = None if limit is None else limit - (taken or 0)
    if soft != resource.RLIM_INFINITY and (left is None or soft - _own_threads() < left):
        limit, left, key = soft, soft - _own_threads(), "`ulimit -u`"
    if left is None:
        return ok("no limit of processes")
    found = f"{left} more threads of {limit} ({key})"
    if left < MIN_THREADS:
        short = fault if question.gpus or left < FEW_THREADS else warning
        return short(f"{found}, and Ray, engines and ranks need {MIN_THREADS}", f"raise {key}")
    return ok(found)


def shared_memory(question: Question) -> Finding:
    """Checks /dev/shm, which Ray's object store, NCCL and vLLM's processes share."""
    disk = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm has {size(disk.total)}, {size(disk.free)} free"
    remedy = "run the container with --shm-size=32g (or --ipc=host; in Kubernetes an emptyDir of medium Memory)"
    if disk.total < MIN_SHARED_BYTES:
        return (fault if question.gpus else warning)(f"{found}, below {size(MIN_SHARED_BYTES)}", remedy)
    wanted = min(memory_bytes() // 5, 8 * GIB)  # size of the object store when dapo starts Ray
    if not question.joined and disk.free < wanted:
        return warning(f"{found}, and Ray's object store takes {size(wanted)}: it will lie on disk, slowly", remedy)
    return ok(found)


def temporary_disk(question: Question) -> Finding:
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    try:
        disk = shutil.disk_usage(folder)
    except OSError as error:
        return fault(f"Ray's temporary directory {folder}: {error}", "create it, or set RAY_TMPDIR to another one")
    found = f"{folder} has {size(disk.free)} free of {size(disk.total)}"
    remedy = "make room there, or name a directory on a local disk with room: RAY_TMPDIR, for launch/slurm NODE_DISK"
    if disk.free < MIN_TEMPORARY_BYTES:
        short = fault if question.gpus or disk.free < FEW_TEMPORARY_BYTES else warning
        return short(f"{found}; Ray's session takes up to {size(MIN_TEMPORARY_BYTES)}", remedy)
    if disk.free < (1 - RAY_STOPS_SPILLING) * disk.total:
        return warning(f"{found}; Ray spills nothing to a disk that is {RAY_STOPS_SPILLING:.0%} full", remedy)
    return ok(found)


def memory_bytes() -> int:
    """Returns the bytes of this machine's memory, or the container's limit if lower."""
    limit = cgroup("memory.max")
    total: int = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def cgroup(name: str) -> int | None:
    """Returns the smallest value of a cgroup file over this process's cgroups and their parents; None: unlimited. name:
    the cgroup v2 file name; for v1, the controller's own tree and file name are used."""
    try:
        lines = OWN_CGROUPS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = []
    for _, controllers, own in (line.split(":", 2) for line in lines):
        controller = name.partition(".")[0]
        if controllers and controller not in controllers.split(","):
            continue
        root, file = (CGROUPS / controller, FIRST_VERSION.get(name, name)) if controllers else (CGROUPS, name)
        for folder in ((group := root / own.lstrip("/")), *group.parents):
            if folder.is_relative_to(root):
                try:
                    found.append(int((folder / file).read_text(encoding="ascii")))
                except (OSError, ValueError):  # "max", or the root group, which has no limit files
                    continue
    return min(found, default=None)


def _own_threads() -> int:
    user, total = os.getuid(), 0
    for process in psutil.process_iter():
        try:
            total += process.num_threads() if process.uids().real == user else 0
        except psutil.Error:  # it has ended, or access is denied
            continue
    return total


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)
