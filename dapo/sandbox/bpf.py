"""Builds and installs filters of system calls: classic BPF for seccomp(2).

In: instructions. Out: the calling process filtered for good. Needs no privilege, works in containers, holds for root.
"""

import ctypes
import platform
import struct

from dapo.sandbox import kernel

# Instructions of classic BPF and results of a seccomp filter: linux/filter.h, linux/seccomp.h.
LOAD, AND, RETURN = 0x20, 0x54, 0x06
JUMP_EQUAL, JUMP_FROM, JUMP_ABOVE, JUMP_BITS = 0x15, 0x35, 0x25, 0x45
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
X32 = 0x40000000  # from here on x86_64 has all calls a second time
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # of an architecture: linux/audit.h
_FILTER = 2  # SECCOMP_MODE_FILTER


def argument(index: int) -> int:
    """Returns the offset of the low half of a system call's argument (little endian)."""
    return 16 + 8 * index


def step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns one instruction; the jumps count the instructions to leap over."""
    return struct.pack("<HBBI", code, if_true, if_false, operand)


def is_known_machine() -> bool:
    """Returns whether filters can be written for this machine's architecture."""
    return platform.machine() in AUDIT


def install(program: list[bytes]) -> bool:
    """Installs a filter; False where the kernel knows none."""
    image = b"".join(program)
    code = ctypes.create_string_buffer(image, len(image))
    head = struct.pack("@HP", len(program), ctypes.addressof(code))
    header = ctypes.create_string_buffer(head, len(head))
    return kernel.prctl(kernel.SET_NO_NEW_PRIVS, 1) and kernel.prctl(
        kernel.SET_SECCOMP, _FILTER, ctypes.addressof(header)
    )
