"""Calls the kernel, mostly where Python's standard library does not: prctl, limits, capabilities, mounts, Landlock.

In: numbers, paths. Out: what the kernel says; an OSError where it refuses. Linux on x86_64 and aarch64.
"""

import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

SET_PDEATHSIG, SET_DUMPABLE, SET_SECCOMP, SET_NO_NEW_PRIVS = 1, 4, 22, 38  # options of prctl(2)
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # flags of unshare(2)
_CAPABILITY_VERSION = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}
_LANDLOCK = 444  # the first of its three calls, the same number on every architecture


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, *arguments: int) -> bool:
    """Returns whether the kernel did it."""
    values = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    return bool(_libc().prctl(option, *values) == 0)


def die_with(parent: int) -> None:
    """Lets the kernel kill this process when the thread of `parent` that started it ends. A change of user takes it
    back."""
    prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)


def live_on() -> None:
    """Takes `die_with` back."""
    prctl(SET_PDEATHSIG, 0)


@contextmanager
def files_as(user: int) -> Iterator[None]:
    """Asks for files as a user and group of that number: what their processes hold, root may not see in a container
    (CAP_SYS_PTRACE)."""
    libc = _libc()
    libc.setfsgid(user)
    libc.setfsuid(user)
    try:
        yield
    finally:
        libc.setfsuid(os.geteuid())
        libc.setfsgid(os.getegid())


def lower_limit(kind: int, value: int) -> None:
    """Sets a limit of this process for good; one that is already lower stays."""
    hard = resource.getrlimit(kind)[1]
    least = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (least, least))


def mapped_bytes() -> int:
    """Returns the bytes that this process has mapped now."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def drop_capabilities() -> None:
    """Gives up every capability of this process. Raises OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    number = _CAPSET.get(os.uname().machine)
    if number is not None:
        _checked(_libc().syscall(number, header, none), "capset")


def unshare(flags: int) -> None:
    """Leaves the namespaces of the parent. Raises OSError where the kernel or a container forbids it."""
    _checked(_libc().unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mounts, as mount(2) does. Raises OSError."""
    words = [word.encode() or None for word in (source, target, kind)]
    result = _libc().mount(*words, ctypes.c_ulong(flags), options.encode() or None)
    _checked(result, f"mount {kind or 'of'} {source} on {target}")


def landlock_version() -> int:
    """Returns the version of Landlock's interface, 0 where the kernel has none or it is switched off."""
    return max(0, int(_libc().syscall(_LANDLOCK, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def landlock_ruleset(attributes: bytes) -> int:
    """Returns a descriptor of a new set of rules. attributes: struct landlock_ruleset_attr. Raises OSError."""
    result = _libc().syscall(_LANDLOCK, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    return _checked(result, "landlock_create_ruleset")


def landlock_rule(ruleset: int, rule: bytes) -> None:
    """Adds a rule for a path. rule: struct landlock_path_beneath_attr. Raises OSError."""
    result = _libc().syscall(_LANDLOCK + 1, ruleset, ctypes.c_int(1), rule, ctypes.c_uint32(0))
    _checked(result, "landlock_add_rule")


def landlock_restrict(ruleset: int) -> None:
    """Restricts this process for good. Raises OSError."""
    _checked(_libc().syscall(_LANDLOCK + 2, ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")
