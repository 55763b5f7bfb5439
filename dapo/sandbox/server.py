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
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from dapo.config.reward import SandboxConfig
from dapo.sandbox import bpf, kernel
from dapo.sandbox.child import MAX_DESCRIPTORS
from dapo.sandbox.confine import python_paths, readable_paths
from dapo.sandbox.frames import contents, pack, receive_piece
from dapo.sandbox.jobs import CHECK_MS, Jobs
from dapo.sandbox.program import Confinement, Program

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
    calls = [True] * bpf.is_known_machine() + [False] * unconfined
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
