"""The machines of a run, on which functions can be called: this process's own, or a Ray cluster's nodes
(`dapo.tools.doctor.nodes`); and checks of them together: authentication, resources, clocks."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from dapo.tools.doctor.network import LIMIT_S, Measured
from dapo.tools.doctor.software import visible_gpus
from dapo.tools.doctor.subject import Finding, Subject, fault, ok, warning

CPU_RANKS = 2
MODE = "RAY_AUTH_MODE"
SKEW_S = 30.0  # half of the time that a lease of the output directory is observed


class Silent(str):
    """The reason why a machine gave no answer."""


def called(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Returns the result of `call`, or a `Silent`: the receiver may not have the exception's class."""
    try:
        return call(*args)
    except Exception as error:
        return Silent(f"{type(error).__name__}: {error}")


class ThisMachine:
    """The machines of a run: this process's own. names: the driver's machine first. Failed calls give a `Silent`."""

    def __init__(self) -> None:
        self.names = ["this machine"]

    def ask(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        return called(call, args)

    def ask_all(self, call: Callable[..., Any], *args: Any) -> dict[str, Any]:
        return {name: self.ask(name, call, *args) for name in self.names}

    def gpus(self) -> int:
        return len(visible_gpus())

    def having_gpus(self) -> int:
        """Number of machines that have GPUs."""
        return min(1, self.gpus())

    def all_reduce(self, device: str) -> list[Any]:
        """Returns a `Measured` or `Silent` per rank of one ring: a rank per GPU, else per machine, at least two."""
        count = self.gpus() if device == "cuda" else CPU_RANKS
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            address = ("127.0.0.1", server.getsockname()[1])
        started = []
        for rank in range(count):
            ring = json.dumps([rank, count, *address, device, rank])
            command = [sys.executable, "-m", "dapo.tools.doctor.network", ring]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        try:
            return [_answer(process) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()


def _answer(process: "subprocess.Popen[str]") -> Any:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Silent(f"no answer within {LIMIT_S:g} s")
    if process.returncode:
        return Silent((err.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return Measured(*json.loads(out.splitlines()[-1]))


def authentication(subject: Subject) -> Finding:
    """Checks that Ray asks for a token: whoever reaches its ports can run code as this user."""
    own = not subject.address
    if (mode := os.environ.get(MODE, "token" if own else "not set")) == "token":
        return ok("Ray asks for a token")
    remedy = f"`export {MODE}=token` on every node, and one token: `(umask 077; ray get-auth-token --generate)`"
    who = "every user of this machine" if own else "whoever reaches Ray's ports"
    return warning(f"{MODE} is {mode}: {who} can run code as this user", f"unset {MODE}" if own else remedy)


def clocks(subject: Subject, machines: ThisMachine) -> Finding:
    """Compares all nodes' clocks with the driver's: files, leases, tokens and logs carry their times."""
    if len(machines.names) == 1:
        return ok("one machine")
    skews = {name: _skew(machines, name) for name in machines.names}
    name = max(skews, key=lambda each: abs(skews[each]))
    found = f"{skews[name]:+.2f} s at {name}, the most of {len(skews)} nodes"
    remedy = "let chrony or systemd-timesyncd set the clocks of all nodes (`chronyc tracking`, `timedatectl`)"
    return fault(found, remedy) if abs(skews[name]) > SKEW_S else ok(found)


def _skew(machines: ThisMachine, name: str) -> float:
    """Returns how many seconds a node's clock is ahead, not counting how long the answer took; 0 without one."""
    before = time.time()
    there = machines.ask(name, time.time)
    after = time.time()
    if isinstance(there, Silent):
        return 0.0
    return max(0.0, there - after) + min(0.0, there - before)
