"""Limits what a reward child may use: memory, files and, if the kernel allows it, no new processes and no network. CPU
time is limited by a timer per item (`fork_server.py`), wall-clock time by the parent. seccomp(2) needs no privilege,
works in containers and also restricts root, unlike RLIMIT_NPROC."""

import errno
import os
import platform
import resource
import signal
from contextlib import suppress
from pathlib import Path

from dapo.config.reward import LimitsConfig
from dapo.sandbox import kernel
from dapo.sandbox.kernel import (
    ALLOW,
    ERRNO,
    JUMP_BITS,
    JUMP_EQUAL,
    JUMP_FROM,
    LOAD,
    RETURN,
    lower_limit,
    mapped_bytes,
    step,
)

MAX_OPEN_FILES = 64
MAX_FILE_BYTES = 1 << 20
_CLONE_THREAD = 0x10000
# System calls by architecture: asm/unistd.h.
_CALLS = {
    "x86_64": {"fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "ptrace": 101, "process_vm_writev": 311}
    | {"clone": 56, "clone3": 435, "socket": 41, "io_uring_setup": 425},
    "aarch64": {"execve": 221, "execveat": 281, "ptrace": 117, "process_vm_writev": 271}
    | {"clone": 220, "clone3": 435, "socket": 198, "io_uring_setup": 425},
}
_PROCESS_CALLS = ("fork", "vfork", "execve", "execveat", "ptrace", "process_vm_writev")
_NETWORK_CALLS = ("socket", "io_uring_setup")  # io_uring opens sockets without the filtered call


def apply(limits: LimitsConfig, *, open_files: int = MAX_OPEN_FILES) -> list[str]:
    """Limits this process permanently. Returns which of `processes` and `network` the kernel now denies."""
    kernel.die_with(os.getppid())
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file above the limit raises OSError
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the OOM killer takes children first
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_NOFILE, open_files)
    lower_limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    lower_limit(resource.RLIMIT_AS, mapped_bytes() + limits.memory_bytes)
    wanted = {"processes": not limits.allow_processes, "network": not limits.allow_network}
    denied = [name for name, deny in wanted.items() if deny]
    filtered = denied and kernel.is_known_machine() and kernel.install(_program(platform.machine(), denied))
    return denied if filtered else []


def _program(machine: str, denied: list[str]) -> list[bytes]:
    """Returns a filter that fails denied calls with EPERM but allows new threads. clone3 hides its flags from a filter:
    ENOSYS makes the C library fall back to clone."""
    numbers = _CALLS[machine]
    refuse = step(RETURN, ERRNO | errno.EPERM)
    code = [
        step(LOAD, kernel.ARCHITECTURE),
        step(JUMP_EQUAL, kernel.AUDIT[machine], 1, 0),
        refuse,
        step(LOAD, kernel.NUMBER),
    ]
    code += [step(JUMP_FROM, kernel.X32, 0, 1), refuse]
    calls = [*(_PROCESS_CALLS if "processes" in denied else ()), *(_NETWORK_CALLS if "network" in denied else ())]
    for call in calls:
        if call in numbers:
            code += [step(JUMP_EQUAL, numbers[call], 0, 1), refuse]
    if "processes" in denied:
        code += [step(JUMP_EQUAL, numbers["clone3"], 0, 1), step(RETURN, ERRNO | errno.ENOSYS)]
        code += [step(JUMP_EQUAL, numbers["clone"], 0, 3), step(LOAD, kernel.argument(0))]
        code += [step(JUMP_BITS, _CLONE_THREAD, 1, 0), refuse]
    return [*code, step(RETURN, ALLOW)]
