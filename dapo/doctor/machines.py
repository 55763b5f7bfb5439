"""Asks the machines of a run: this one in the process, those of a Ray cluster by `dapo.doctor.nodes`.

In: a function and its arguments. Out: its result by machine, or a `Silent` that says why there is none.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Protocol

from dapo.doctor.checked.allreduce import LIMIT_S, Measured
from dapo.doctor.checked.devices import visible_gpus

CPU_RANKS = 2


class Silent(str):
    """Says why a machine gave no answer."""


def called(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Returns what `call` gives, or a `Silent`: the class of an exception may not be known where it goes."""
    try:
        return call(*args)
    except Exception as error:
        return Silent(f"{type(error).__name__}: {error}")


class Machines(Protocol):
    """Answers questions. names: of the machines, the driver's first where it is among them."""

    names: list[str]

    def ask(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Returns what `call` gives on one machine, or a `Silent`."""

    def ask_all(self, call: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """Returns what `call` gives on each, at the same time, or a `Silent`."""

    def gpus(self) -> int:
        """Counts the GPUs of all."""

    def having_gpus(self) -> int:
        """Counts the machines that have any."""

    def all_reduce(self, device: str) -> list[Any]:
        """Returns what each rank of a ring over all of them measures (`doctor.checked.allreduce`), or a
        `Silent`; a rank per GPU, without GPUs one per machine, at least two."""


class ThisMachine:
    """Answers for the machine that the process runs on."""

    def __init__(self) -> None:
        self.names = ["this machine"]

    def ask(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Calls it here."""
        return called(call, args)

    def ask_all(self, call: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """Calls it here."""
        return {self.names[0]: called(call, args)}

    def gpus(self) -> int:
        """Counts this machine's."""
        return len(visible_gpus())

    def having_gpus(self) -> int:
        """Counts this one, where it has any."""
        return min(1, self.gpus())

    def all_reduce(self, device: str) -> list[Any]:
        """Starts a process per rank."""
        count = self.gpus() if device == "cuda" else CPU_RANKS
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            address = ("127.0.0.1", server.getsockname()[1])
        started = []
        for rank in range(count):
            ring = json.dumps([rank, count, *address, device, rank])
            command = [sys.executable, "-m", "dapo.doctor.checked.allreduce", ring]
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
