"""Limits what a reward child may use: memory, files, and, where the kernel grants it, no process and no network.

In: `LimitsConfig`. Out: the calling process limited for good, and the names of what the kernel granted. CPU time is a
timer per item (`dapo.rewards.fork_server`) and wall-clock time the parent's business. seccomp(2) needs no privilege,
works in containers, and holds for root, for whom RLIMIT_NPROC does nothing.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from contextlib import suppress
from pathlib import Path

from dapo.config.reward import LimitsConfig

MAX_OPEN_FILES = 64
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_THREAD = 0x10000
# Instructions of classic BPF and results of a seccomp filter: linux/filter.h, linux/seccomp.h.
_LOAD, _JUMP_EQUAL, _JUMP_FROM, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_X32 = 0x40000000  # from here on x86_64 has all calls a second time
_NR, _ARCH, _ARG0 = 0, 4, 16  # offsets in struct seccomp_data (little endian: the low half of the argument)
# Audit number of the architecture and its system calls: asm/unistd.h.
_ARCHITECTURES = {
    "x86_64": (
        0xC000003E,
        {"fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "ptrace": 101, "process_vm_writev": 311}
        | {"clone": 56, "clone3": 435, "socket": 41, "io_uring_setup": 425},
    ),
    "aarch64": (
        0xC00000B7,
        {"execve": 221, "execveat": 281, "ptrace": 117, "process_vm_writev": 271}
        | {"clone": 220, "clone3": 435, "socket": 198, "io_uring_setup": 425},
    ),
}
_PROCESS_CALLS = ("fork", "vfork", "execve", "execveat", "ptrace", "process_vm_writev")
_NETWORK_CALLS = ("socket", "io_uring_setup")  # a ring opens sockets behind the filter's back


def apply(limits: LimitsConfig) -> list[str]:
    """Limits this process for good. Returns what the kernel granted of `processes` and `network`."""
    die_with_parent()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file beyond the limit is an OSError
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, a child goes first
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _set(resource.RLIMIT_FSIZE, limits.file_bytes)
    _set(resource.RLIMIT_AS, _address_space() + limits.memory_bytes)
    wanted = {"processes": not limits.allow_processes, "network": not limits.allow_network}
    denied = [name for name, deny in wanted.items() if deny]
    return denied if denied and _filter(denied) else []


def live_without_parent() -> None:
    """Takes `die_with_parent` back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def _set(kind: int, value: int) -> None:
    """Sets a limit; one that is already lower stays."""
    hard = resource.getrlimit(kind)[1]
    least = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (least, least))


def _address_space() -> int:
    """Returns the bytes that this process has mapped now."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def die_with_parent() -> None:
    """Lets the kernel kill this process when the thread that started it ends."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)


def _prctl(option: int, *arguments: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    return libc.prctl(option, *values) == 0


def _filter(denied: list[str]) -> bool:
    """Installs the filter; False where the kernel or the machine's architecture knows none."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    program = b"".join(_program(platform.machine(), denied))
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    header = ctypes.create_string_buffer(head, len(head))
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1) and _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def _program(machine: str, denied: list[str]) -> list[bytes]:
    """Returns a filter by which denied calls fail with EPERM; a new thread is no new process. clone3 hides its flags
    from a filter: ENOSYS sends the C library back to clone."""
    audit, numbers = _ARCHITECTURES[machine]
    refuse = _step(_RETURN, _ERRNO | errno.EPERM)
    code = [_step(_LOAD, _ARCH), _step(_JUMP_EQUAL, audit, 1, 0), refuse, _step(_LOAD, _NR)]
    code += [_step(_JUMP_FROM, _X32, 0, 1), refuse]
    calls = [*(_PROCESS_CALLS if "processes" in denied else ()), *(_NETWORK_CALLS if "network" in denied else ())]
    for call in calls:
        if call in numbers:
            code += [_step(_JUMP_EQUAL, numbers[call], 0, 1), refuse]
    if "processes" in denied:
        code += [_step(_JUMP_EQUAL, numbers["clone3"], 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
        code += [_step(_JUMP_EQUAL, numbers["clone"], 0, 3), _step(_LOAD, _ARG0)]
        code += [_step(_JUMP_BITS, _CLONE_THREAD, 1, 0), refuse]
    return [*code, _step(_RETURN, _ALLOW)]


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns one instruction; the jumps count the instructions to leap over."""
    return struct.pack("<HBBI", code, if_true, if_false, operand)
