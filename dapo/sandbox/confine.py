"""Confines the calling process permanently (files, user, limits, system calls). Runs in the child before the program.
Raises OSError if the kernel refuses a part; the program is then not run."""

import errno
import importlib.util
import os
import platform
import resource
import signal
import struct
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dapo.config.reward import SandboxConfig
from dapo.sandbox import kernel
from dapo.sandbox.kernel import (
    ALLOW,
    AND,
    ARCHITECTURE,
    AUDIT,
    ERRNO,
    JUMP_ABOVE,
    JUMP_BITS,
    JUMP_EQUAL,
    JUMP_FROM,
    KILL_PROCESS,
    LOAD,
    NUMBER,
    RETURN,
    X32,
    argument,
    step,
)
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
        enter_mounts(place.folder, place.readable, place.limits)
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
    if way.calls and not kernel.install(filter_of(os.getpid())):
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


FOLDER = "/box"
_READ_ONLY, _NO_SUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 1 << 14, 1 << 18
# statvfs flags that a mount in a user namespace must keep, and their mount(2) values.
_KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}


def enter_mounts(folder: str, readable: Sequence[str], limits: SandboxConfig) -> None:
    """Makes `folder` the root directory and `FOLDER` in it the working directory."""
    _leave_the_namespaces()
    kernel.mount("", "/", flags=_RECURSIVE | _PRIVATE)
    size = (limits.files + 1) * limits.output_bytes
    kernel.mount("tmpfs", folder, "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=755")
    for path in readable:
        _show(path, folder)
    box = f"{folder}{FOLDER}"
    os.mkdir(box)
    kernel.mount("tmpfs", box, "tmpfs", _NO_SUID | _NO_DEVICES, f"size={size},nr_inodes={limits.files + 2},mode=1777")
    kernel.mount("", folder, flags=_REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    os.chroot(folder)
    os.chdir(FOLDER)


def _leave_the_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.NEW_MOUNTS)
    except PermissionError:
        kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS)
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)


def _show(path: str, folder: str) -> None:
    """Binds a path read-only at the same place below `folder`; a symbolic link stays a link."""
    target = f"{folder}{path}"
    if os.path.lexists(target):
        return  # inside an earlier path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    kernel.mount(path, target, flags=_BIND | _RECURSIVE)
    flags = os.statvfs(path).f_flag
    kept = sum(flag for given, flag in _KEPT.items() if flags & given)
    kernel.mount("", target, flags=_REMOUNT | _BIND | _READ_ONLY | kept)


# Allowed with any arguments: files (Landlock or mounts restrict these), memory, time, threads, the process itself.
_FREE = {
    "x86_64": """
        read 0 write 1 close 3 fstat 5 lseek 8 mmap 9 mprotect 10 munmap 11 brk 12 rt_sigaction 13 rt_sigprocmask 14
        rt_sigreturn 15 rt_sigpending 127 rt_sigtimedwait 128 rt_sigsuspend 130 pread64 17 pwrite64 18 readv 19
        writev 20 preadv 295 pwritev 296 preadv2 327 pwritev2 328 access 21 faccessat 269 faccessat2 439 pipe 22
        pipe2 293 select 23 pselect6 270 poll 7 ppoll 271 epoll_create 213 epoll_create1 291 epoll_ctl 233
        epoll_wait 232 epoll_pwait 281 epoll_pwait2 441 eventfd 284 eventfd2 290 timerfd_create 283
        timerfd_settime 286 timerfd_gettime 287 sched_yield 24 mremap 25 msync 26 mincore 27 madvise 28 dup 32
        dup2 33 dup3 292 pause 34 nanosleep 35 clock_nanosleep 230 getitimer 36 setitimer 38 alarm 37 getpid 39
        sendfile 40 copy_file_range 326 uname 63 fsync 74 fdatasync 75 ftruncate 77 fallocate 285 getdents 78
        getdents64 217 getcwd 79 chdir 80 fchdir 81 rename 82 renameat 264 renameat2 316 unlink 87 unlinkat 263
        readlink 89 readlinkat 267 gettimeofday 96 time 201 getrlimit 97 getrusage 98 sysinfo 99
        times 100 getuid 102 getgid 104 geteuid 107 getegid 108 getppid 110 getpgrp 111 getpgid 121 getsid 124
        getresuid 118 getresgid 120 getgroups 115 sigaltstack 131 statfs 137 fstatfs 138 stat 4 lstat 6
        newfstatat 262 statx 332 umask 95 gettid 186 futex 202 futex_waitv 449 sched_getaffinity 204
        sched_getparam 143 sched_getscheduler 145 sched_get_priority_max 146 sched_get_priority_min 147
        set_tid_address 218 clock_gettime 228 clock_getres 229 exit 60 exit_group 231 set_robust_list 273
        arch_prctl 158 getcpu 309 getrandom 318 rseq 334 membarrier 324 restart_syscall 219 recvfrom 45 sendto 44
        shutdown 48 getsockopt 55 getsockname 51 getpeername 52 fadvise64 221 flock 73 close_range 436
    """,
    "aarch64": """
        read 63 write 64 close 57 fstat 80 lseek 62 mmap 222 mprotect 226 munmap 215 brk 214 rt_sigaction 134
        rt_sigprocmask 135 rt_sigreturn 139 rt_sigpending 136 rt_sigtimedwait 137 rt_sigsuspend 133 pread64 67
        pwrite64 68 readv 65 writev 66 preadv 69 pwritev 70 preadv2 286 pwritev2 287 faccessat 48 faccessat2 439
        pipe2 59 pselect6 72 ppoll 73 epoll_create1 20 epoll_ctl 21 epoll_pwait 22 epoll_pwait2 441 eventfd2 19
        timerfd_create 85 timerfd_settime 86 timerfd_gettime 87 sched_yield 124 mremap 216 msync 227 mincore 232
        madvise 233 dup 23 dup3 24 nanosleep 101 clock_nanosleep 115 getitimer 102 setitimer 103 getpid 172
        sendfile 71 copy_file_range 285 uname 160 fsync 82 fdatasync 83 ftruncate 46 fallocate 47 getdents64 61
        getcwd 17 chdir 49 fchdir 50 renameat 38 renameat2 276 unlinkat 35 readlinkat 78 gettimeofday 169
        getrlimit 163 getrusage 165 sysinfo 179 times 153 getuid 174 getgid 176 geteuid 175 getegid 177
        getppid 173 getpgid 155 getsid 156 getresuid 148 getresgid 150 getgroups 158 sigaltstack 132 statfs 43
        fstatfs 44 newfstatat 79 statx 291 umask 166 gettid 178 futex 98 futex_waitv 449 sched_getaffinity 123
        sched_getparam 121 sched_getscheduler 120 sched_get_priority_max 125 sched_get_priority_min 126
        set_tid_address 96 clock_gettime 113 clock_getres 114 exit 93 exit_group 94 set_robust_list 99 getcpu 168
        getrandom 278 rseq 293 membarrier 283 restart_syscall 128 recvfrom 207 sendto 206 shutdown 210 getsockopt 209
        getsockname 204 getpeername 205 fadvise64 223 flock 32 close_range 436
    """,
}
# Allowed with some arguments only.
_PARTLY = {
    "x86_64": """
        open 2 openat 257 clone 56 clone3 435 kill 62 tgkill 234 prctl 157 setrlimit 160 prlimit64 302 fcntl 72
        ioctl 16 socketpair 53
    """,
    "aarch64": """
        openat 56 clone 220 clone3 435 kill 129 tgkill 131 prctl 167 setrlimit 164 prlimit64 261 fcntl 25 ioctl 29
        socketpair 199
    """,
}
_NEW = 424  # from here on numbers are the same on all architectures; clone3 hides its flags from a filter
_CLONE_THREAD, _CLONE_NEW = 0x10000, 0x7E020080  # threads are allowed, new namespaces are not
_NAMELESS = 0o20000000  # O_TMPFILE: a file without a name
_O_TRUNCATE, _ACCESS_AND_TRUNCATE = (
    0o1000,
    0o1003,
)  # O_TRUNC with O_RDONLY truncates, and old Landlock versions allow it
_UNIX, _STREAM, _TYPE = 1, 1, 0xF
_NAME_SET, _NAME_GET, _NAME_MEMORY = 15, 16, 0x53564D41  # prctl
_TERMINAL_AND_WAITING = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # ioctl
_CPU, _REAL_TIME = 0, 15  # setrlimit: limits that end a process by SIGKILL
# fcntl: commands that make the kernel send signals to other processes.
_SIGNALS = (8, 10, 15, 1024, 1026)


def filter_of(pid: int) -> list[bytes]:
    machine = platform.machine()
    code = [step(LOAD, ARCHITECTURE), step(JUMP_EQUAL, AUDIT[machine], 1, 0), step(RETURN, KILL_PROCESS)]
    code += [step(LOAD, NUMBER), step(JUMP_FROM, X32, 0, 1), _refuse(errno.EPERM)]
    for first, last in _ranges(sorted(_numbers(_FREE[machine]).values())):
        code += [step(JUMP_FROM, first, 0, 2), step(JUMP_ABOVE, last, 1, 0), step(RETURN, ALLOW)]
    partly = _numbers(_PARTLY[machine])
    for name, checks in _checks(pid).items():
        if name in partly:
            code += [step(JUMP_EQUAL, partly[name], 0, len(checks)), *checks]
    code += [step(JUMP_FROM, _NEW, 0, 1), _refuse(errno.ENOSYS)]
    return [*code, _refuse(errno.EPERM)]


def _checks(pid: int) -> dict[str, list[bytes]]:
    """Returns, per call, the instructions that check its arguments and return a result."""
    to_itself = {
        name: [
            *(step(LOAD, argument(0)), step(JUMP_EQUAL, pid, 1, 0), _refuse(errno.EPERM)),
            # No program may send itself SIGKILL: that signal then always comes from outside, such as the kernel.
            *(step(LOAD, argument(signal_at)), step(JUMP_EQUAL, signal.SIGKILL, 0, 1), _refuse(errno.EPERM)),
            step(RETURN, ALLOW),
        ]
        for name, signal_at in (("kill", 1), ("tgkill", 2))
    }
    opening = {
        name: [
            # The error of a file system without O_TMPFILE.
            *(step(LOAD, argument(flags_at)), step(JUMP_BITS, _NAMELESS, 0, 1), _refuse(errno.EOPNOTSUPP)),
            *(step(AND, _ACCESS_AND_TRUNCATE), step(JUMP_EQUAL, _O_TRUNCATE, 0, 1), _refuse(errno.EPERM)),
            step(RETURN, ALLOW),
        ]
        for name, flags_at in (("open", 1), ("openat", 2))
    }
    return {
        **to_itself,
        **opening,
        "clone": [
            *(step(LOAD, argument(0)), step(JUMP_BITS, _CLONE_NEW, 0, 1), _refuse(errno.EPERM)),
            *(step(JUMP_BITS, _CLONE_THREAD, 1, 0), _refuse(errno.EPERM), step(RETURN, ALLOW)),
        ],
        "clone3": [_refuse(errno.ENOSYS)],
        "prctl": _one_of(0, (_NAME_SET, _NAME_GET, _NAME_MEMORY)),
        "setrlimit": _none_of(0, (_CPU, _REAL_TIME)),
        "prlimit64": [
            *(step(LOAD, argument(0)), step(JUMP_EQUAL, 0, 1, 0), _refuse(errno.EPERM)),  # this process only
            *(step(LOAD, argument(1)), step(JUMP_EQUAL, _CPU, 2, 0), step(JUMP_EQUAL, _REAL_TIME, 1, 0)),
            step(RETURN, ALLOW),
            # Reading a limit is allowed: then the address of the new limit is 0, in both halves.
            *(step(LOAD, argument(2)), step(JUMP_EQUAL, 0, 0, 2), step(LOAD, argument(2) + 4)),
            *(step(JUMP_EQUAL, 0, 1, 0), _refuse(errno.EPERM), step(RETURN, ALLOW)),
        ],
        "ioctl": _one_of(1, _TERMINAL_AND_WAITING),
        "fcntl": _none_of(1, _SIGNALS),
        "socketpair": [
            *(step(LOAD, argument(0)), step(JUMP_EQUAL, _UNIX, 1, 0), _refuse(errno.EPERM)),
            *(step(LOAD, argument(1)), step(AND, _TYPE), step(JUMP_EQUAL, _STREAM, 1, 0), _refuse(errno.EPERM)),
            step(RETURN, ALLOW),
        ],
    }


def _one_of(index: int, values: tuple[int, ...]) -> list[bytes]:
    allowed = [part for value in values for part in (step(JUMP_EQUAL, value, 0, 1), step(RETURN, ALLOW))]
    return [step(LOAD, argument(index)), *allowed, _refuse(errno.EPERM)]


def _none_of(index: int, values: tuple[int, ...]) -> list[bytes]:
    refused = [part for value in values for part in (step(JUMP_EQUAL, value, 0, 1), _refuse(errno.EPERM))]
    return [step(LOAD, argument(index)), *refused, step(RETURN, ALLOW)]


def _refuse(number: int) -> bytes:
    return step(RETURN, ERRNO | number)


def _numbers(listing: str) -> dict[str, int]:
    words = listing.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    cuts = [0, *(place + 1 for place, (a, b) in enumerate(pairwise(numbers)) if b != a + 1), len(numbers)]
    return [(numbers[first], numbers[end - 1]) for first, end in pairwise(cuts)]
