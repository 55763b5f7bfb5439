"""Machines that are none: processes with an address, process ids, shared memory and a disk of their own, on a switch.

Everything lives in namespaces that a process holds; with it they go, and with the test's process it goes. The only
things that all machines share are the files of this one, as nodes share a network file system.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import psutil

SCRATCH = "/mnt"  # each machine's own disk; as short a path as a site's, for Ray puts sockets below it
NETWORK, FIRST = "10.77.0", 11
APART = ("--mount", "--uts", "--ipc", "--pid")
ENTER = ("--net", "--mount", "--uts", "--ipc", "--pid")
# Reaps what loses its parents, as a machine's first process does.
INIT = "trap : TERM INT; while true; do sleep 3600 & wait $!; done"
STARTED_S = 30.0


def why_not() -> str:
    """Why this machine can make no others; empty when it can."""
    done = subprocess.run(["unshare", "--net", *APART, "--fork", "true"], capture_output=True, text=True)
    return f"namespaces cannot be made here: {done.stderr.strip()}" if done.returncode else ""


class Machine:
    """One of them. name: its host's. address: on the switch. env: what its processes get besides their caller's."""

    def __init__(self, name: str, address: str, hosts: str) -> None:
        self.name, self.address = name, address
        self.env: dict[str, str] = {}
        self._holder = _hold("unshare", "--net", *APART, "--propagation=private", "--fork", "--kill-child")
        self.init = _child(self._holder)
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write(hosts)
        try:
            self.do("mount", "-t", "proc", "proc", "/proc")
            self.do("hostname", name)
            self.do("mount", "--bind", file.name, "/etc/hosts")
            for folder in ("/dev/shm", SCRATCH):
                self.do("mount", "-t", "tmpfs", "-o", "mode=1777", "none", folder)
            self.do("ip", "link", "set", "lo", "up")
        finally:
            os.unlink(file.name)

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """A process there, below one here of which `process_of` says which it is. how: of Popen."""
        within = ["nsenter", f"--target={self.init}", *ENTER, f"--wd={how.pop('cwd', '/')}"]
        how["env"] = {**how.get("env", os.environ), **self.env}
        return subprocess.Popen([*within, *command], **how)

    def do(self, *command: str) -> str:
        """What a command prints there; it must succeed."""
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = process.communicate(timeout=STARTED_S)
        assert process.returncode == 0, f"{self.name}: {' '.join(command)}: {err}"
        return str(out)

    def processes(self) -> list[psutil.Process]:
        """All that run there, seen from here."""
        space = os.stat(f"/proc/{self.init}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter():
            try:
                if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == space:
                    found.append(process)
            except OSError:
                continue
        return found

    def work(self) -> list[psutil.Process]:
        """The same without what makes it a machine."""
        idle = {self.init, *[each.pid for each in psutil.Process(self.init).children() if each.name() == "sleep"]}
        return [process for process in self.processes() if process.pid not in idle]

    def kill(self, name: str) -> None:
        """Kills the one process of this name."""
        [process] = [each for each in self.processes() if each.name() == name]
        process.kill()

    def power_off(self) -> None:
        """Ends all that is there at once, and its network."""
        self._holder.kill()
        self._holder.wait(timeout=STARTED_S)


class Machines:
    """Machines on a switch, without a way out of it; all go at the end of the context. machines: as the names stand."""

    def __init__(self, names: Sequence[str]) -> None:
        self._switch = _hold("unshare", "--net", "--pid", "--fork", "--kill-child")
        try:
            self._network = _child(self._switch)
            self._ip("link", "add", "switch", "type", "bridge")
            self._ip("link", "set", "switch", "up")
            self.machines: list[Machine] = []
            addresses = {name: f"{NETWORK}.{FIRST + i}" for i, name in enumerate(names)}
            for name in names:
                self._join(name, addresses)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> list[Machine]:
        return self.machines

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self.machines:
            machine.power_off()
        self._switch.kill()
        self._switch.wait(timeout=STARTED_S)

    def plug(self, machine: Machine, state: str) -> None:
        """The cable between a machine and the switch, `up` or `down`: what goes down says so to nobody."""
        self._ip("link", "set", machine.name, state)

    def _join(self, name: str, addresses: dict[str, str]) -> None:
        # Debian's way with a machine's own name, which means a network that no other machine reaches.
        others = [f"{address} {other}" for other, address in addresses.items() if other != name]
        machine = Machine(name, addresses[name], "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, ""]))
        self.machines.append(machine)
        cable = ("type", "veth", "peer", "name", name, "netns", str(self._network))
        subprocess.run(["ip", "link", "add", "eth0", "netns", str(machine.init), *cable], check=True)
        self._ip("link", "set", name, "master", "switch", "up")
        machine.do("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
        machine.do("ip", "link", "set", "eth0", "up")

    def _ip(self, *words: str) -> None:
        subprocess.run(["nsenter", f"--target={self._network}", "--net", "ip", *words], check=True)


def _hold(*words: str) -> subprocess.Popen[bytes]:
    # It dies with the process that started it, however that ends.
    line = ("setpriv", "--pdeathsig", "KILL", *words, "bash", "-c", INIT)
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)


def _child(process: subprocess.Popen[Any]) -> int:
    """The id of the only process below this one, which is about to start it."""
    deadline = time.monotonic() + STARTED_S
    while not (below := psutil.Process(process.pid).children()) or below[0].name() != "bash":
        assert process.poll() is None and time.monotonic() < deadline, "a namespace could not be made"
        time.sleep(0.01)
    return int(below[0].pid)


def process_of(process: subprocess.Popen[Any]) -> psutil.Process | None:
    """What `Machine.start` started on the machine, None when it has ended."""
    try:
        below = psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return None
    return below[0] if below else None


def signal_there(process: subprocess.Popen[Any], number: int) -> None:
    """Sends a signal to what `Machine.start` started."""
    if (there := process_of(process)) is not None:
        there.send_signal(signal.Signals(number))
