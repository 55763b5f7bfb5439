"""Linux calls that are mostly missing in Python's standard library: prctl, limits, capabilities, mounts, Landlock.
Supports x86_64 and aarch64. Functions raise OSError if the kernel refuses, unless noted."""

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

SET_PDEATHSIG, SET_DUMPABLE, SET_SECCOMP, SET_NO_NEW_PRIVS = 1, 4, 22, 38  # options of prctl(2)
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # flags of unshare(2)
_CAPABILITY_VERSION = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}
_LANDLOCK = 444  # first of its three calls; same number on every architecture


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, *arguments: int) -> bool:
    """Returns whether the kernel accepted the call."""
    values = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    return bool(_libc().prctl(option, *values) == 0)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when the thread of `parent` that started it ends. A change of user reverts
    this."""
    prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)


def live_on() -> None:
    prctl(SET_PDEATHSIG, 0)


@contextmanager
def files_as(user: int) -> Iterator[None]:
    """Accesses files as the user and group with this id. In a container, root without CAP_SYS_PTRACE cannot see
    otherwise which files that user's processes hold."""
    libc = _libc()
    libc.setfsgid(user)
    libc.setfsuid(user)
    try:
        yield
    finally:
        libc.setfsuid(os.geteuid())
        libc.setfsgid(os.getegid())


def lower_limit(kind: int, value: int) -> None:
    """Lowers a resource limit of this process permanently; a lower one stays."""
    hard = resource.getrlimit(kind)[1]
    least = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (least, least))


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    number = _CAPSET.get(os.uname().machine)
    if number is not None:
        _checked(_libc().syscall(number, header, none), "capset")


def unshare(flags: int) -> None:
    """Raises OSError if the kernel or a container forbids it."""
    _checked(_libc().unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [word.encode() or None for word in (source, target, kind)]
    result = _libc().mount(*words, ctypes.c_ulong(flags), options.encode() or None)
    _checked(result, f"mount {kind or 'of'} {source} on {target}")


def landlock_version() -> int:
    """Returns Landlock's ABI version; 0 if the kernel has none or it is disabled."""
    return max(0, int(_libc().syscall(_LANDLOCK, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def landlock_ruleset(attributes: bytes) -> int:
    """Returns the descriptor of a new rule set. attributes: struct landlock_ruleset_attr."""
    result = _libc().syscall(_LANDLOCK, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    return _checked(result, "landlock_create_ruleset")


def landlock_rule(ruleset: int, rule: bytes) -> None:
    result = _libc().syscall(_LANDLOCK + 1, ruleset, ctypes.c_int(1), rule, ctypes.c_uint32(0))
    _checked(result, "landlock_add_rule")


def landlock_restrict(ruleset: int) -> None:
    _checked(_libc().syscall(_LANDLOCK + 2, ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")


# Instructions of classic BPF and results of a seccomp filter: linux/filter.h, linux/seccomp.h.
LOAD, AND, RETURN = 0x20, 0x54, 0x06
JUMP_EQUAL, JUMP_FROM, JUMP_ABOVE, JUMP_BITS = 0x15, 0x35, 0x25, 0x45
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
X32 = 0x40000000  # from here on x86_64 has a second copy of all calls
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # architecture ids: linux/audit.h
_FILTER = 2  # SECCOMP_MODE_FILTER


def argument(index: int) -> int:
    """Returns the offset of the low half of a system call's argument (little endian)."""
    return 16 + 8 * index


def step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns one instruction. if_true, if_false: number of instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, operand)


def is_known_machine() -> bool:
    return platform.machine() in AUDIT


def install(program: list[bytes]) -> bool:
    image = b"".join(program)
    code = ctypes.create_string_buffer(image, len(image))
    head = struct.pack("@HP", len(program), ctypes.addressof(code))
    header = ctypes.create_string_buffer(head, len(head))
    return prctl(SET_NO_NEW_PRIVS, 1) and prctl(SET_SECCOMP, _FILTER, ctypes.addressof(header))
