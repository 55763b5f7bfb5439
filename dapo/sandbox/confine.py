"""Confines the calling process for good: files, users, limits, system calls. Runs in the child, before the program.

In: a `Confinement` and a `Place`. Out: a process that reaches nothing outside of its place. Raises OSError where the
kernel refuses a part, and nothing runs then.
"""

import importlib.util
import os
import resource
import signal
import struct
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dapo.config.sandbox import SandboxConfig
from dapo.sandbox import bpf, calls, kernel, mounts
from dapo.sandbox.program import Confinement

STACK_BYTES = 64 << 20  # of the main thread: deep recursion is a usual style
MAX_OPEN_FILES = 64
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")  # shared objects of extensions
# Rights of Landlock, as bits: linux/landlock.h.
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_FILE, _TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # how many the version of the interface has; 16 from the fifth on
_NETWORK_RIGHTS, _SCOPES = 0b11, 0b11  # from the fourth and from the sixth on


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Holds where a program runs. folder: its own temporary directory. readable: what it may read besides. user: number
    of the user and the group that it runs as, where it has its own. parent: process that it ends with."""

    folder: str
    readable: tuple[str, ...]
    user: int
    parent: int
    limits: SandboxConfig


def readable_paths(packages: Sequence[str]) -> tuple[str, ...]:
    """Returns what every program may read: Python, shared objects, a few devices. Raises ValueError as below."""
    paths = {*python_paths(packages), *LIBRARIES, *DEVICES}
    return tuple(sorted(path for path in paths if os.path.exists(path)))


def python_paths(packages: Sequence[str]) -> tuple[str, ...]:
    """Returns the directories of the standard library and of installed packages. Raises ValueError for a package that
    is not there."""
    paths = {sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)}
    for name in packages:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None:
            raise ValueError(
                f"`reward.limits.sandbox.packages` names {name!r}, which is no package that is installed here; install "
                "it on every node or take it out"
            )
        for place in spec.submodule_search_locations or [spec.origin or ""]:
            paths |= {place, f"{place}.libs"}  # shared objects that a wheel brings lie beside it
    return tuple(sorted(path for path in paths if os.path.exists(path)))


def confine(way: Confinement, place: Place) -> None:
    """Confines this process, whose working directory becomes the folder of `place`."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, a program goes first
    mapped = kernel.mapped_bytes()
    os.setsid()
    if way.files == "mounts":
        mounts.enter(place.folder, place.readable, place.limits)
    else:
        os.chdir(place.folder)
    _limit(place.limits, mapped, threads=way.own_user)
    if way.own_user:
        os.setgroups([])
        os.setresgid(place.user, place.user, place.user)
        os.setresuid(place.user, place.user, place.user)
        kernel.prctl(kernel.SET_DUMPABLE, 1)  # the change of user hides from the server what it holds
    kernel.die_with(place.parent)
    kernel.drop_capabilities()
    kernel.prctl(kernel.SET_NO_NEW_PRIVS, 1)
    if way.files == "landlock":
        _restrict_files(place)
    if way.calls and not bpf.install(calls.filter_of(os.getpid())):
        raise OSError("the kernel knows no filter of system calls (seccomp)")


def _limit(limits: SandboxConfig, mapped: int, *, threads: bool) -> None:
    """Sets what the kernel counts itself. threads: of a user of its own; any other has more of them already."""
    seconds = int(limits.cpu_s) + 2  # whole seconds, in case that nobody watches
    wanted = {
        resource.RLIMIT_AS: mapped + limits.memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: limits.output_bytes,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_STACK: STACK_BYTES,
        **({resource.RLIMIT_NPROC: limits.threads + 1} if threads else {}),
    }
    for kind, value in wanted.items():
        kernel.lower_limit(kind, value)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # a flood ends the program


def _restrict_files(place: Place) -> None:
    version = kernel.landlock_version()
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack(
        "=QQQ", rights, _NETWORK_RIGHTS if version >= 4 else 0, _SCOPES if version >= 6 else 0
    )  # the kernel takes a longer structure than it knows where the rest is 0
    ruleset = kernel.landlock_ruleset(attributes)
    _allow(ruleset, ".", rights & (_WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_FILE | _MAKE_FILE | _TRUNCATE))
    for path in place.readable:
        more = _READ_DIR if os.path.isdir(path) else _WRITE_FILE if path in DEVICES else 0
        _allow(ruleset, path, _READ_FILE | more)
    kernel.landlock_restrict(ruleset)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allows some rights to a path and what is below it; one that this user cannot even name needs no rule."""
    with suppress(PermissionError):
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            kernel.landlock_rule(ruleset, struct.pack("=Qi", rights, handle))
        finally:
            os.close(handle)
