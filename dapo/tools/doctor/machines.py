"""The machines of a run, on which functions can be called: this process's own, or a Ray cluster's nodes
(`dapo.tools.doctor.nodes`); and checks of them together: authentication, resources, clocks."""

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dapo.tools.doctor.network import LIMIT_S, Measured
from dapo.tools.doctor.software import visible_gpus
from dapo.tools.doctor.subject import Finding, Subject, fault, ok, warning

CPU_RANKS = 2
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # also in workers.own_cluster
DEFAULT_PATH = Path("~/.ray/auth_token")
MAKE = f"`export {MODE}=token` on every node, and one token: `(umask 077; ray get-auth-token --generate)`"
SKEW_S, FAULT_SKEW_S = 1.0, 30.0  # FAULT_SKEW_S: half of the time that a lease of the output directory is observed
ASKED = 3  # attempts; the fastest answer counts


class Silent(str):
    """The reason why a machine gave no answer."""


def called(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Returns the result of `call`, or a `Silent`: the receiver may not have the exception's class."""
    try:
        return call(*args)
    except Exception as error:
        return Silent(f"{type(error).__name__}: {error}")


class Machines(Protocol):
    """The machines of a run. names: the driver's machine first, if it is among them. Failed calls give a `Silent`."""

    names: list[str]

    def ask(self, name: str, call: Callable[..., Any], *args: Any) -> Any: ...

    def ask_all(self, call: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """Returns the result of `call`, or a `Silent`, for each machine; calls run in parallel."""

    def gpus(self) -> int: ...

    def having_gpus(self) -> int:
        """Number of machines that have GPUs."""

    def all_reduce(self, device: str) -> list[Any]:
        """Returns a `Measured` or `Silent` per rank of one ring: a rank per GPU, else per machine, at least two."""


class ThisMachine:
    def __init__(self) -> None:
        self.names = ["this machine"]

    def ask(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        return called(call, args)

    def ask_all(self, call: Callable[..., Any], *args: Any) -> dict[str, Any]:
        return {self.names[0]: called(call, args)}

    def gpus(self) -> int:
        return len(visible_gpus())

    def having_gpus(self) -> int:
        return min(1, self.gpus())

    def all_reduce(self, device: str) -> list[Any]:
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
    """Checks Ray's token: set, present, and readable only by its owner."""
    own, given, token = not subject.address, os.environ.get(TOKEN_PATH), os.environ.get(TOKEN)
    mode = os.environ.get(MODE, "token" if own else "")
    if mode != "token":
        who = "every user of this machine" if own else "whoever reaches Ray's ports"
        remedy = f"unset {MODE}" if own else MAKE
        return warning(f"{MODE} is {mode or 'not set'}, not `token`: {who} can run code as this user", remedy)
    if own and not token and not given:
        return ok("Ray starts on this machine, on loopback, with a token of this run's own")
    if token:
        return ok(f"token in {TOKEN}")
    path = Path(given or DEFAULT_PATH).expanduser()
    try:
        held, bits = path.read_text(encoding="utf-8").strip(), path.stat().st_mode
    except OSError as error:
        return fault(f"{MODE} is `token`, and its file cannot be read: {error}", MAKE)
    if not held:
        return fault(f"{path} is empty", MAKE)
    if bits & (stat.S_IRWXG | stat.S_IRWXO):
        return fault(f"{path} has mode {stat.S_IMODE(bits):o}: other users may use it", f"`chmod 600 {path}`")
    return ok(f"token in {path}")


def placement(subject: Subject, machines: Machines) -> Finding:
    if not subject.uses_gpus:
        return ok("no GPU asked for")
    from dapo.tools.doctor.nodes import fitting  # imports Ray

    try:
        return ok(fitting(subject.cfg, machines))
    except ValueError as error:
        if limit := subject.cfg.trainer.nodes_timeout_s:
            return warning(str(error), f"the run waits for more nodes for {limit:g} s (`trainer.nodes_timeout_s`)")
        return fault(str(error), "")


def clocks(subject: Subject, machines: Machines) -> Finding:
    """Compares all nodes' clocks with the driver's: files, leases, tokens and logs carry their times."""
    if len(machines.names) == 1:
        return ok("one machine")
    skews = {name: skew for name in machines.names if (skew := _skew(machines, name)) is not None}
    if not skews:
        return warning("no node told its time", "see what the checks of the nodes say")
    name = max(skews, key=lambda each: abs(skews[each]))
    found = f"{skews[name]:+.2f} s at {name}, the most of {len(skews)} nodes"
    remedy = "let chrony or systemd-timesyncd set the clocks of all nodes (`chronyc tracking`, `timedatectl`)"
    if abs(skews[name]) > FAULT_SKEW_S:
        return fault(found, remedy)
    return warning(found, remedy) if abs(skews[name]) > SKEW_S else ok(found)


def _skew(machines: Machines, name: str) -> float | None:
    """Returns the smallest possible skew of a node's clock in seconds, positive if it is ahead; None if it did not
    answer."""
    best: tuple[float, float] | None = None
    for _ in range(ASKED):
        before = time.time()
        there = machines.ask(name, time.time)
        after = time.time()
        if isinstance(there, float) and (best is None or after - before < best[0]):
            best = (after - before, there - (before + after) / 2)
    if best is None:
        return None
    window, skew = best
    return max(0.0, skew - window / 2) if skew > 0 else min(0.0, skew + window / 2)
