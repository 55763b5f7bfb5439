"""Calls functions on the machines of a run: this process's machine, or a Ray cluster's nodes (`dapo.doctor.nodes`)."""

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
