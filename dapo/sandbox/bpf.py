"""Builds and installs system call filters: classic BPF for seccomp(2). A filter is permanent for the process, needs no
privilege, works in containers, and also restricts root."""

import ctypes
import platform
import struct

from dapo.sandbox import kernel

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
    return kernel.prctl(kernel.SET_NO_NEW_PRIVS, 1) and kernel.prctl(
        kernel.SET_SECCOMP, _FILTER, ctypes.addressof(header)
    )
