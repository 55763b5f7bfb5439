"""Runs the sandbox's fork server, `python -m dapo.sandbox.server REQUESTS HELLO SETTINGS`.

    client ──limits, a socket──▶ server ──fork──▶ child   (confined; runs one program)
       │ ▲                         │ watches, stops, counts ▲
       │ └──exit, reason, files────┘                        │
       └──────────────the program over that socket──────────┘

Its modules are loaded, so that a program costs milliseconds. It never reads a program or its output, which are in
memory files passed to the client. At start it probes the confinements with a program and uses the first that works.
"""

import fcntl
import gc
import importlib
import json
import os
import re
import resource
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from dapo.config.reward import SandboxConfig
from dapo.sandbox import kernel
from dapo.sandbox.child import BEGUN, MAX_DESCRIPTORS, MAX_WORDS, become
from dapo.sandbox.confine import Place, python_paths, readable_paths
from dapo.sandbox.program import Confinement, Program, contents, pack, receive_piece, send_piece

CHECK_MS = 50  # interval of limit checks
SETUP_S = 20.0  # from the fork to the start of the program
FIRST_USER, USERS = 2_000_000_000, 1 << 24  # user ids without an account
_OUTPUTS = ("stdout", "stderr", "result")


@dataclass(slots=True)
class Waits:
    """Counts the seconds a program waited for a core, for one thread at a time: threads that wait in parallel count
    once. seen: total waiting seconds of each thread, which the kernel updates at the end of a wait. leader: the thread
    whose waits count. wanted: whether the leader wanted a core at the last check, at seen_at."""

    total_s: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)
    leader: str = ""
    wanted: bool = False
    seen_at: float = field(default_factory=time.monotonic)

    def see(self, threads: dict[str, tuple[float, bool]], now: float) -> None:
        """Updates the count. threads: live threads with waiting seconds and whether each wants a core. A thread that
        does takes the lead from one that sleeps or has ended."""
        more = {name: max(0.0, waited - self.seen.get(name, 0.0)) for name, (waited, _) in threads.items()}
        want = [name for name, (_, wants) in threads.items() if wants] or ([] if self.leader in threads else [*threads])
        before_s, since_s = more.get(self.leader, 0.0), now - self.seen_at
        if self.wanted and self.leader not in threads:
            before_s = since_s  # unknown how long it waited before it ended
        self.total_s += before_s
        if want and self.leader not in want:
            before, self.leader = self.leader, max(want, key=lambda name: more[name])
            # The two waits are consecutive. A new thread's wait follows the whole wait of the old leader.
            most_s = since_s - (0.0 if before in threads and self.leader not in self.seen else before_s)
            self.total_s += max(0.0, min(more[self.leader], most_s))
        self.wanted = self.leader in want
        self.seen |= {name: waited for name, (waited, _) in threads.items()}
        self.seen_at = now


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """A running program. ready: descriptor that reports its start. began: time of the fork, later of the program's
    start. before_s: CPU time up to then. used_s, used_at: its CPU time, and when it last grew. reason, error: why it
    was stopped, by its own fault or by the sandbox's. user: as in `Place`."""

    pid: int
    channel: socket.socket
    outputs: list[int]
    ready: int
    folder: str
    limits: SandboxConfig
    number: int
    user: int
    began: float = field(default_factory=time.monotonic)
    runs: bool = False
    before_s: float = 0.0
    waits: Waits = field(default_factory=Waits)
    used_s: float = 0.0
    used_at: float = field(default_factory=time.monotonic)
    reason: str = ""
    error: str = ""

    def own_s(self, cpu_s: float, until: float) -> float:
        """Returns its seconds without waits for a core, and at least its CPU time divided by the number of threads it
        may have. until: start of a wait in progress, which the kernel counts only at its end; or now."""
        return max(cpu_s / (self.limits.threads + 1), until - self.began - self.waits.total_s)


class Jobs:
    def __init__(self, way: Confinement, folder: str, readable: tuple[str, ...]) -> None:
        self.way = way
        self.running: dict[int, Job] = {}
        self.poll = select.poll()
        self._folder = folder
        self._readable = readable
        self._first_user = FIRST_USER + 64 * secrets.randbelow(USERS)  # different from other servers' users
        self._wake, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self.poll.register(self._wake, select.POLLIN)
        self._checked = time.monotonic()

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._wake)
        os.close(self._wake_write)

    def begin(self, limits: SandboxConfig, channel: socket.socket) -> None:
        """Starts a child that reads its program from `channel`. The outcome and the output files, or a sandbox error,
        go there too."""
        used = {job.number for job in self.running.values()}
        number = next(number for number in range(len(used) + 1) if number not in used)
        user = self._first_user + number
        folder = f"{self._folder}/{number}"
        opened: list[int] = []
        try:
            os.mkdir(folder, 0o700)
            os.utime(folder, (0, 0))  # modification time 0 until a file is created in it
            if self.way.own_user:
                os.chown(folder, user, user)
            for name in _OUTPUTS:
                opened.append(os.memfd_create(name))
            outputs = list(opened)
            opened += os.pipe()
            ready, ready_write = opened[-2:]
            place = Place(folder=folder, readable=self._readable, user=user, parent=os.getpid(), limits=limits)
            pid = os.fork()
        except OSError as error:
            _reply(channel, {"error": f"no process for a program: {error}"}, [])
            channel.close()
            for handle in opened:
                os.close(handle)
            shutil.rmtree(folder, ignore_errors=True)
            return
        if pid == 0:
            become(self.way, place, channel, outputs, ready_write)
        os.close(ready_write)
        job = Job(
            pid=pid,
            channel=channel,
            outputs=outputs,
            ready=ready,
            folder=folder,
            limits=limits,
            number=number,
            user=user,
        )
        self.running[pid] = job
        self.poll.register(ready, select.POLLIN)
        self.poll.register(channel, 0)  # reports when the client closes its end

    def turn(self, timeout_ms: int | None) -> list[tuple[int, int]]:
        """Waits for events, handles those of programs, and returns the others."""
        jobs = {handle: job for job in self.running.values() for handle in (job.ready, job.channel.fileno())}
        others = []
        for handle, event in self.poll.poll(timeout_ms):
            if handle == self._wake:
                os.read(self._wake, 4096)
                self._collect()
            elif handle not in jobs:
                others.append((handle, event))
            elif jobs[handle].pid in self.running:
                self._hear(jobs[handle], handle)
        if time.monotonic() >= self._checked + CHECK_MS / 1e3:
            for job in self.running.values():
                try:
                    self._check(job)
                except OSError:  # it has just ended, or its directory was removed
                    pass
                except Exception as error:  # of this program alone: the others' go on
                    self._stop(job, error=f"the program could not be watched ({type(error).__name__}: {error})")
            self._checked = time.monotonic()
        return others

    def kill_all(self) -> None:
        for job in list(self.running.values()):
            self._stop(job, error="the sandbox's server ends")
            os.waitpid(job.pid, 0)

    def _hear(self, job: Job, handle: int) -> None:
        if handle == job.channel.fileno():
            self.poll.unregister(handle)
            self._stop(job, error="nobody waits for the outcome")
            return
        self.poll.unregister(job.ready)
        if error := _read_beginning(job):
            self._stop(job, error=error)
        else:
            job.began, job.before_s = time.monotonic(), _cpu_seconds(job.pid)
            _see_waits(job)
            job.waits.total_s = 0.0

    def _check(self, job: Job) -> None:
        limits, elapsed = job.limits, time.monotonic() - job.began
        if not job.runs:
            if elapsed > SETUP_S:
                self._stop(job, error=f"the program did not begin within {SETUP_S:g} s")
            return
        _see_waits(job)
        now = time.monotonic()
        if (used_s := _cpu_seconds(job.pid)) > job.used_s:
            job.used_s, job.used_at = used_s, now
        cpu_s = used_s - job.before_s
        if cpu_s >= limits.cpu_s:
            self._stop(job, reason="cpu")
        elif elapsed >= limits.wall_s and job.own_s(cpu_s, _waits_since(job, now)) >= limits.wall_s:
            self._stop(job, reason="wall")
        elif elapsed >= longest_s(limits):
            self._stop(job, error="the machine is so busy that the program got no core")
        elif _threads(job.pid) > limits.threads + 1:
            self._stop(job, reason="threads")
        elif os.stat(job.folder).st_mtime and self._files(job) > limits.files:
            self._stop(job, reason="files")

    def _files(self, job: Job) -> int:
        """Returns the number of a program's files, including open or mapped files without a name."""
        named = len(os.listdir(job.folder))
        with kernel.files_as(job.user) if self.way.own_user else nullcontext():
            return named + len(_nameless(job))

    def _stop(self, job: Job, *, reason: str = "", error: str = "") -> None:
        if not (job.reason or job.error):
            job.reason, job.error = reason, error
        with suppress(ProcessLookupError):
            if not self.way.calls:
                os.killpg(job.pid, signal.SIGKILL)  # unfiltered programs may start processes
            os.kill(job.pid, signal.SIGKILL)

    def _collect(self) -> None:
        while self.running:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            if (job := self.running.pop(ended.si_pid, None)) is not None:
                _see_waits(job)
            _, status, usage = os.wait4(ended.si_pid, 0)
            if job is not None:
                self._report(job, os.waitstatus_to_exitcode(status), usage)

    def _report(self, job: Job, status: int, usage: resource.struct_rusage) -> None:
        for handle in (job.ready, job.channel.fileno()):
            with suppress(KeyError):
                self.poll.unregister(handle)
        try:
            outcome = _outcome(job, status, usage)
            shutil.rmtree(job.folder, ignore_errors=True)
        except Exception as error:  # of this program alone: the others' go on
            outcome = {"error": f"the program left no outcome ({type(error).__name__}: {error})"}
        _reply(job.channel, outcome, [] if "error" in outcome else job.outputs)
        job.channel.close()
        for handle in (job.ready, *job.outputs):
            os.close(handle)


def _outcome(job: Job, status: int, usage: resource.struct_rusage) -> dict[str, object]:
    if not job.runs and not job.error:
        job.error = _read_beginning(job)
    cpu_s, now = max(0.0, usage.ru_utime + usage.ru_stime - job.before_s), time.monotonic()
    reason = job.reason or _reason(job, status, cpu_s)
    if status == -signal.SIGKILL and not (reason or job.error):
        job.error = "something outside of the sandbox killed the program, such as a machine short of memory"
    if job.error:
        return {"error": job.error}
    # A program that was not stopped was within its limit; a thread's last wait may be missing from the count.
    wall_s = min(job.own_s(cpu_s, now), job.limits.wall_s)
    return {"exit": status, "reason": reason, "cpu_s": cpu_s, "wall_s": wall_s}


def _read_beginning(job: Job) -> str:
    """Records whether a program has begun; returns why not, or ""."""
    words = os.read(job.ready, MAX_WORDS)
    job.runs = words == BEGUN
    return "" if job.runs else words.decode(errors="replace") or "its process ended before the program began"


def longest_s(limits: SandboxConfig) -> float:
    """Returns the seconds after which a program that got no core is stopped with a sandbox error."""
    return 10.0 * limits.wall_s + SETUP_S


def _reason(job: Job, status: int, cpu_s: float) -> str:
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and cpu_s >= job.limits.cpu_s):
        return "cpu"
    full = any(os.fstat(handle).st_size >= job.limits.output_bytes for handle in job.outputs)
    return "output" if full or status == -signal.SIGXFSZ else ""


def _reply(channel: socket.socket, value: dict[str, object], outputs: list[int]) -> None:
    with suppress(OSError):  # the client has closed its end
        send_piece(channel, value, outputs)


def _waits_since(job: Job, now: float) -> float:
    """Returns when a program that wants a core last had one; `now` if it does not want one."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{job.pid}/task"):
            with suppress(OSError):
                if _wants(f"/proc/{job.pid}/task/{thread}"):
                    return job.used_at
    return now


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of a child so far: see clock_getcpuclockid(3)."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _threads(pid: int) -> int:
    return int(_fields(f"/proc/{pid}/stat")[17])


def _nameless(job: Job) -> set[int]:
    found, maps = set[int](), b""
    place = re.escape("/".join(["", *job.folder.split("/")[-2:], ""])).encode()
    mapped = re.compile(rb"^\S+ \S+ \S+ \S+ +(\d+) .*" + place + rb".* \(deleted\)$", re.MULTILINE)
    opened = re.compile(rb".*" + place + rb".* \(deleted\)", re.DOTALL)
    for thread in os.listdir(f"/proc/{job.pid}/task"):  # the main thread may have ended and shows nothing then
        at = f"/proc/{job.pid}/task/{thread}".encode()
        with suppress(OSError):
            maps = maps or Path(os.fsdecode(at + b"/maps")).read_bytes()  # the same for all threads
            for handle in os.listdir(at + b"/fd"):
                with suppress(OSError):
                    if opened.fullmatch(os.readlink(at + b"/fd/" + handle)):
                        found.add(os.stat(at + b"/fd/" + handle).st_ino)
    return found.union(map(int, mapped.findall(maps)))


def _fields(stat: str) -> list[bytes]:
    """Returns the fields after the name, which a program can set to any bytes: proc(5)."""
    return Path(stat).read_bytes().rpartition(b")")[2].split()


def _wants(thread: str) -> bool:
    return _fields(f"{thread}/stat")[0] == b"R"


def _see_waits(job: Job) -> None:
    threads: dict[str, tuple[float, bool]] = {}
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{job.pid}/task"):
            with suppress(OSError, ValueError, IndexError):
                at = f"/proc/{job.pid}/task/{thread}"
                waited = Path(f"{at}/schedstat").read_bytes().split()[1]
                threads[thread] = int(waited) / 1e9, _wants(at)
    job.waits.see(threads, time.monotonic())


PREFIX = "dapo-sandbox-"  # of server directories
UNHELD_S = 60.0  # age from which an unlocked directory has no server, rather than one that is about to lock it
PROBE_LIMITS = SandboxConfig(cpu_s=20.0, wall_s=20.0)
_PROBE = """
import os, socket
import colorsys, encodings.idna  # not known to the server before
{imports}
for path in {readable}:
    os.path.isdir(path) and os.listdir(path)
def refused(act, *given):
    try:
        act(*given)
    except OSError:
        return True
with open("probe", "w") as file:
    file.write("x")
if {files}:
    assert refused(os.listdir, {outside!r}) and refused(open, "/proc/self/environ"), "files outside are there"
if {calls}:
    assert refused(socket.socket) and refused(os.kill, os.getppid(), 0), "system calls are not filtered"
"""
_NO_WAY = (
    "programs that the model wrote cannot be confined on this machine ({reasons}); use a kernel with Landlock (Linux "
    "5.13 or newer, `landlock` among its security modules), or one that allows a private mount namespace, or, for a "
    "model that you trust, set `reward.limits.allow_unconfined=true`"
)


def main() -> None:
    requests, hello = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    settings = json.loads(sys.argv[3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(MAX_DESCRIPTORS, hard) if hard >= 0 else MAX_DESCRIPTORS, hard))
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)  # until this process ends
        os.chmod(folder, 0o711)  # programs may run as other users
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        jobs: Jobs | None = None
        try:
            readable = readable_paths(settings["packages"])
            for name in settings["packages"]:
                importlib.import_module(name)
            gc.collect()
            gc.freeze()  # the children share these pages as long as no process writes to them
            jobs = _first_that_holds(folder, readable, settings)
            hello.sendall(pack(asdict(jobs.way)))
        except ValueError as error:
            hello.sendall(pack({"error": str(error)}))
            return
        finally:
            hello.close()
        try:
            _serve(requests, jobs)
        finally:
            jobs.kill_all()


def sweep(directory: Path) -> None:
    """Removes directories of killed servers: those that no living process has locked."""
    for folder in directory.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or locked
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(handle).st_mtime > UNHELD_S:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _serve(requests: socket.socket, jobs: Jobs) -> None:
    poll = jobs.poll
    poll.register(requests, select.POLLIN)
    while True:
        for handle, _ in jobs.turn(CHECK_MS if jobs.running else None):
            if handle == requests.fileno():
                limits, channels = receive_piece(requests, 1)
                if limits is None:
                    return
                jobs.begin(SandboxConfig(**limits), socket.socket(fileno=channels[0]))


def _first_that_holds(folder: str, readable: tuple[str, ...], settings: dict[str, Any]) -> Jobs:
    reasons = [] if kernel.landlock_version() else ["the kernel has no Landlock, or does not use it"]
    for way in _ways(settings["files"], unconfined=settings["allow_unconfined"]):
        jobs = Jobs(way, folder, readable)
        reason = _probe(jobs, folder, settings["packages"])
        if not reason:
            return jobs
        jobs.close()
        reasons.append(f"{way.files or 'unconfined'}{', own user' * way.own_user}: {reason}")
    raise ValueError(_NO_WAY.format(reasons="; ".join(reasons)))


def _ways(files: list[str], *, unconfined: bool) -> list[Confinement]:
    kinds = [kind for kind in files if kind != "landlock" or kernel.landlock_version()] + [""] * unconfined
    calls = [True] * kernel.is_known_machine() + [False] * unconfined
    users = [True, False] if os.geteuid() == 0 else [False]
    return [Confinement(files=a, calls=b, own_user=c) for a, b, c in product(kinds, calls, users)]


def _probe(jobs: Jobs, folder: str, packages: list[str]) -> str:
    imports = "\n".join(f"import {name}" for name in packages)
    way = jobs.way
    readable = python_paths(packages)
    source = _PROBE.format(imports=imports, readable=readable, outside=folder, files=bool(way.files), calls=way.calls)
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(pack(asdict(Program(source=source))))
        jobs.begin(PROBE_LIMITS, theirs)
        while jobs.running:
            jobs.turn(CHECK_MS)
        reply, handles = receive_piece(ours, 3)
    written = [contents(handle, PROBE_LIMITS.output_bytes).decode(errors="replace") for handle in handles]
    if "error" in reply:
        return str(reply["error"])
    return "" if reply["exit"] == 0 else f"the probe ended with {reply['exit']} {reply['reason']}: {written[1][-300:]}"


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
