"""Makes what a hostile program would like to reach, and finds out whether it did."""

import hashlib
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

TRUTH = "7f3a9c41e8"  # expected output, which no program is told


class Outside:
    """Holds a process, files, sockets beside the sandbox. `values`: their names for the programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "outside"
        self.folder.mkdir()
        self.folder.chmod(0o777)
        self.checkpoint = self.folder / "checkpoint"
        self.checkpoint.write_text(TRUTH * 100)
        self.secret = self.folder / "data.jsonl"
        self.secret.write_text(TRUTH)
        for file in (self.checkpoint, self.secret):
            file.chmod(0o666)  # what a user of its own would be kept from anyway
        command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(3600)"]
        self.victim = subprocess.Popen(command, env={**os.environ, "SECRET": TRUTH}, stdout=subprocess.PIPE)
        assert self.victim.stdout is not None and self.victim.stdout.readline(), "it did not start"
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(self.tcp.getsockname())
        self.unix = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.unix.bind(str(self.folder / "s"))
        for one in (self.tcp, self.udp, self.unix):
            one.setblocking(False)
        self.values = {
            "folder": self.folder,
            "checkpoint": self.checkpoint,
            "secret_file": self.secret,
            "victim": self.victim.pid,
            "port": self.tcp.getsockname()[1],
            "unix": self.folder / "s",
            "truth": "no truth",
        }
        self.before = self.state()

    def state(self) -> dict[str, object]:
        """Returns all that no program may change."""
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        pid = self.victim.pid
        return {
            "files": [(str(path), path.stat().st_mode, path.stat().st_uid, path.stat().st_mtime_ns) for path in files],
            "contents": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
            "names": sorted(os.listdir(self.folder)),
            "mode": self.folder.stat().st_mode,
            "links": self.checkpoint.stat().st_nlink,
            "victim": (self.victim.poll(), Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "SR"),
            "limits": [resource.prlimit(pid, kind) for kind in range(16)],
            "priority": (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), os.sched_getaffinity(pid)),
            "oom": Path(f"/proc/{pid}/oom_score_adj").read_text(),
            "shared": sorted(name for name in os.listdir("/dev/shm") if f"dapo-{pid}" in name),
            "sysv": [line for name in ("shm", "sem", "msg") for line in _ours(name, pid)],
            "made": os.path.exists(f"/tmp/dapo-made-{pid}"),
            "host": socket.gethostname(),
            "heard": [_heard(one) for one in (self.tcp, self.udp, self.unix)],
        }

    def close(self) -> None:
        self.victim.kill()
        self.victim.communicate()
        for one in (self.tcp, self.udp, self.unix):
            one.close()


def _ours(name: str, key: int) -> list[str]:
    """Returns the objects of System V that have the key of the programs."""
    lines = Path(f"/proc/sysvipc/{name}").read_text().splitlines()[1:]
    return [line for line in lines if line.split()[0] == str(key)]


def _heard(one: socket.socket) -> bool:
    try:
        return bool(one.accept() if one.type == socket.SOCK_STREAM else one.recv(99))
    except BlockingIOError:
        return False
