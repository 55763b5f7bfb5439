"""The filter of system calls on both architectures: an interpreter of classic BPF runs it on calls as they are made."""

import errno
import platform
import struct

import pytest

from dapo.sandbox import bpf, calls

PID = 4711
ALLOWED, EPERM, ENOSYS, KILLED = "allowed", errno.EPERM, errno.ENOSYS, "killed"
NUMBERS = {  # of calls that are in no list
    "x86_64": {"socket": 41, "fork": 57, "execve": 59, "ptrace": 101, "chmod": 90, "connect": 42, "memfd_create": 319},
    "aarch64": {"socket": 198, "execve": 221, "ptrace": 117, "fchmodat": 53, "connect": 203, "memfd_create": 279},
}


def decide(machine, number, *arguments, architecture=None):
    """What the filter makes of a call."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<II8x6Q", number & 0xFFFFFFFF, architecture or bpf.AUDIT[machine], *words)
    program, place, held = calls.filter_of(PID), 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack("<HBBI", program[place])
        place += 1
        if code == bpf.LOAD:
            (held,) = struct.unpack_from("<I", data, operand)
        elif code == bpf.AND:
            held &= operand
        elif code == bpf.RETURN:
            return {bpf.ALLOW: ALLOWED, bpf.KILL_PROCESS: KILLED}.get(operand) or operand & 0xFFFF
        else:
            tests = {
                bpf.JUMP_EQUAL: held == operand,
                bpf.JUMP_FROM: held >= operand,
                bpf.JUMP_ABOVE: held > operand,
                bpf.JUMP_BITS: bool(held & operand),
            }
            place += if_true if tests[code] else if_false


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    return request.param


def partly(machine):
    return calls._numbers(calls._PARTLY[machine])


def test_what_is_listed_is_allowed_and_nothing_else(machine):
    free, some = calls._numbers(calls._FREE[machine]), partly(machine)
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


@pytest.mark.parametrize(
    ("name", "arguments", "decision"),
    [
        pytest.param("kill", (PID, 6), ALLOWED, id="signal-itself"),
        pytest.param("kill", (PID, 9), EPERM, id="kill-itself"),
        pytest.param("kill", (2**64 - 1, 9), EPERM, id="kill-all"),
        pytest.param("kill", (0, 15), EPERM, id="signal-the-group"),
        pytest.param("kill", (1, 15), EPERM, id="signal-another"),
        pytest.param("tgkill", (PID, PID, 6), ALLOWED, id="signal-a-thread"),
        pytest.param("tgkill", (PID, PID, 9), EPERM, id="kill-a-thread"),
        pytest.param("tgkill", (1, 1, 6), EPERM, id="signal-a-thread-of-another"),
        pytest.param("clone", (0x3D0F00,), ALLOWED, id="thread"),
        pytest.param("clone", (17,), EPERM, id="process"),
        pytest.param("clone", (0x10000 | 0x10000000,), EPERM, id="thread-in-a-namespace"),
        pytest.param("clone3", (0, 88), ENOSYS, id="clone3"),
        pytest.param("openat", (0, 0, 0o2), ALLOWED, id="open-to-write"),
        pytest.param("openat", (0, 0, 0o1001), ALLOWED, id="open-to-overwrite"),
        pytest.param("openat", (0, 0, 0o1000), EPERM, id="truncate-by-reading"),
        pytest.param("prctl", (15,), ALLOWED, id="name"),
        pytest.param("prctl", (1, 0), EPERM, id="outlive-the-parent"),
        pytest.param("prlimit64", (0, 7), ALLOWED, id="own-limits"),
        pytest.param("prlimit64", (1, 7), EPERM, id="limits-of-another"),
        pytest.param("fcntl", (3, 3), ALLOWED, id="flags"),
        pytest.param("fcntl", (3, 8), EPERM, id="owner-of-signals"),
        pytest.param("ioctl", (1, 0x5401), ALLOWED, id="is-it-a-terminal"),
        pytest.param("ioctl", (1, 0x5412), EPERM, id="type-into-a-terminal"),
        pytest.param("socketpair", (1, 1 | 0o2000000), ALLOWED, id="pair"),
        pytest.param("socketpair", (1, 2), EPERM, id="pair-of-datagrams"),
        pytest.param("socketpair", (2, 1), EPERM, id="pair-on-a-network"),
    ],
)
def test_calls_by_their_arguments(machine, name, arguments, decision):
    assert decide(machine, partly(machine)[name], *arguments) == decision
