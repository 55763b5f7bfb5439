"""The filter of system calls on both architectures: an interpreter of classic BPF runs it on calls as they are made."""

import errno
import os
import platform
import struct

import pytest

from dapo.sandbox import confine, kernel

PID = 4711
ALLOWED, EPERM, ENOSYS, KILLED = "allowed", errno.EPERM, errno.ENOSYS, "killed"
NUMBERS = {  # of calls that are in no list
    "x86_64": {"socket": 41, "fork": 57, "execve": 59, "ptrace": 101, "chmod": 90, "connect": 42, "memfd_create": 319},
    "aarch64": {"socket": 198, "execve": 221, "ptrace": 117, "fchmodat": 53, "connect": 203, "memfd_create": 279},
}
BY_ARGUMENTS = {  # what is allowed, and what is not
    "kill": ([(PID, 6)], [(PID, 9), (2**64 - 1, 9), (0, 15), (1, 15)]),  # by itself: no kill, no group, no other
    "tgkill": ([(PID, PID, 6)], [(PID, PID, 9), (1, 1, 6)]),
    "clone": ([(0x3D0F00,)], [(17,), (0x10000 | 0x10000000,)]),  # a thread; a process, a namespace
    "openat": ([(0, 0, 0o2), (0, 0, 0o1001)], [(0, 0, 0o1000)]),  # to write; to truncate by reading
    "prctl": ([(15,)], [(1, 0)]),  # a name; to outlive the parent
    # Files; seconds of CPU and of real time, at which the kernel kills. To ask for these is allowed.
    "setrlimit": ([(7, 1)], [(0, 1), (15, 1)]),
    "prlimit64": ([(0, 7), (0, 7, 1), (0, 0), (0, 15, 0, 1)], [(1, 7), (0, 0, 1), (0, 15, 1), (0, 0, 1 << 32)]),
    "fcntl": ([(3, 3)], [(3, 8)]),  # flags; the owner of signals
    "ioctl": ([(1, 0x5401)], [(1, 0x5412)]),  # is it a terminal; to type into one
    "socketpair": ([(1, 1 | 0o2000000)], [(1, 2), (2, 1)]),  # streams; datagrams, a network
}


def decide(machine, number, *arguments, architecture=None):
    """What the filter makes of a call."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<II8x6Q", number & 0xFFFFFFFF, architecture or kernel.AUDIT[machine], *words)
    program, place, held = confine.filter_of(PID), 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack("<HBBI", program[place])
        place += 1
        if code == kernel.LOAD:
            (held,) = struct.unpack_from("<I", data, operand)
        elif code == kernel.AND:
            held &= operand
        elif code == kernel.RETURN:
            return {kernel.ALLOW: ALLOWED, kernel.KILL_PROCESS: KILLED}.get(operand) or operand & 0xFFFF
        else:
            tests = {
                kernel.JUMP_EQUAL: held == operand,
                kernel.JUMP_FROM: held >= operand,
                kernel.JUMP_ABOVE: held > operand,
                kernel.JUMP_BITS: bool(held & operand),
            }
            place += if_true if tests[code] else if_false


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    return request.param


def partly(machine):
    return confine._numbers(confine._PARTLY[machine])


def test_what_is_listed_is_allowed_and_nothing_else(machine):
    free, some = confine._numbers(confine._FREE[machine]), partly(machine)
    assert not set(free.values()) & set(some.values())
    for number in range(600):
        if number not in some.values():
            wanted = ALLOWED if number in free.values() else EPERM if number < 424 else ENOSYS
            assert decide(machine, number, PID) == wanted, number
    for name, number in NUMBERS[machine].items():
        assert decide(machine, number) == EPERM, name


def test_another_architecture_ends_the_process(machine):
    assert decide(machine, 0, architecture=0x40000003) == KILLED
    if machine == "x86_64":
        assert decide(machine, 0x40000000 + 39) == EPERM


@pytest.mark.parametrize("name", BY_ARGUMENTS)
def test_calls_by_their_arguments(machine, name):
    allowed, refused = BY_ARGUMENTS[name]
    number = partly(machine)[name]
    assert [decide(machine, number, *arguments) for arguments in allowed] == [ALLOWED] * len(allowed)
    assert [decide(machine, number, *arguments) for arguments in refused] == [EPERM] * len(refused)


def test_a_file_without_a_name_is_said_not_to_be_supported(machine):
    assert decide(machine, partly(machine)["openat"], 0, 0, os.O_TMPFILE | os.O_RDWR) == errno.EOPNOTSUPP
    assert decide(machine, partly(machine)["openat"], 0, 0, os.O_DIRECTORY) == ALLOWED


def test_clone3_is_said_not_to_exist(machine):
    assert decide(machine, partly(machine)["clone3"], 0, 88) == ENOSYS
