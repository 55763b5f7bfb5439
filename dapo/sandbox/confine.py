"""Confines the calling process permanently (files, user, limits, system calls). Runs in the child before the program.
Raises OSError if the kernel refuses a part; the program is then not run."""

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

from dapo.config.reward import SandboxConfig
from dapo.sandbox import bpf, calls, kernel, mounts
from dapo.sandbox.program import Confinement

STACK_BYTES = 64 << 20  # of the main thread: programs often recurse deeply
MAX_OPEN_FILES = 64
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")  # shared libraries of extension modules
# Landlock rights as bits: linux/landlock.h.
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_FILE, _TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights by ABI version; 16 from version 5 on
_NETWORK_RIGHTS, _SCOPES = 0b11, 0b11  # from ABI versions 4 and 6 on


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a program runs. folder: its temporary directory. readable: other paths that it may read. user: its user and
    group id, if it has its own. parent: the process with which it ends."""

    folder: str
    readable: tuple[str, ...]
    user: int
    parent: int
    limits: SandboxConfig


def readable_paths(packages: Sequence[str]) -> tuple[str, ...]:
    """Returns the paths that every program may read. Raises ValueError as `python_paths`."""
    paths = {*python_paths(packages), *LIBRARIES, *DEVICES}
    return tuple(sorted(path for path in paths if os.path.exists(path)))


def python_paths(packages: Sequence[str]) -> tuple[str, ...]:
    """Returns the directories of the standard library and of packages. Raises ValueError for a missing package."""
    paths = {sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)}
    for name in packages:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None:
            raise ValueError(
                f"`reward.limits.sandbox.packages` names {name!r}, which is no package that is installed here; install "
                "it on every node or take it out"
            )
        for place in spec.submodule_search_locations or [spec.origin or ""]:
            paths |= {place, f"{place}.libs"}  # shared libraries of a wheel
    return tuple(sorted(path for path in paths if os.path.exists(path)))


def confine(way: Confinement, place: Place) -> None:
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the OOM killer takes programs first
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
        kernel.prctl(kernel.SET_DUMPABLE, 1)  # after the change of user, the server could not see its open files
    kernel.die_with(place.parent)
    kernel.drop_capabilities()
    kernel.prctl(kernel.SET_NO_NEW_PRIVS, 1)
    if way.files == "landlock":
        _restrict_files(place)
    if way.calls and not bpf.install(calls.filter_of(os.getpid())):
        raise OSError("the kernel knows no filter of system calls (seccomp)")


def _limit(limits: SandboxConfig, mapped: int, *, threads: bool) -> None:
    """Sets the kernel's resource limits. threads: whether to limit threads, which works only for a user of its own."""
    seconds = int(limits.cpu_s) + 2  # fallback in whole seconds if the server does not watch
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
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # too much output ends the program


def _restrict_files(place: Place) -> None:
    version = kernel.landlock_version()
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack(
        "=QQQ", rights, _NETWORK_RIGHTS if version >= 4 else 0, _SCOPES if version >= 6 else 0
    )  # the kernel accepts a longer structure than it knows if the rest is 0
    ruleset = kernel.landlock_ruleset(attributes)
    _allow(ruleset, ".", rights & (_WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_FILE | _MAKE_FILE | _TRUNCATE))
    for path in place.readable:
        more = _READ_DIR if os.path.isdir(path) else _WRITE_FILE if path in DEVICES else 0
        _allow(ruleset, path, _READ_FILE | more)
    kernel.landlock_restrict(ruleset)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Grants rights to a path and everything below it. A path that this user cannot open needs no rule."""
    with suppress(PermissionError):
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            kernel.landlock_rule(ruleset, struct.pack("=Qi", rights, handle))
        finally:
            os.close(handle)
