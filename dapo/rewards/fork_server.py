"""Runs the fork server, `python -m dapo.rewards.fork_server FD`: imports the reward functions and forks the children.

    reward worker ──fork requests──▶ fork server  ──fork──▶ child   (limited, scores one response at a time)
         ▲  ▲──────pids and ends──────────┘                   │
         └─────────────────── JSON over a socket ─────────────┘

It is started afresh, never forked from a process that runs Ray, torch or threads; a child costs milliseconds, not an
import. Frames are JSON behind their length in 4 bytes, so that what comes back is numbers and text and no pickle.

To this process: one frame with the settings, then one byte and a socket per child. From it: one frame when it is ready
or cannot be, then a frame per ended child. To a child: an item; from it, after a frame of its own: a verdict.
"""

import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np

from dapo.config.reward import LimitsConfig, RewardFunctionConfig
from dapo.rewards import sandbox
from dapo.rewards.functions import RewardFunctionError, RewardFunctions
from dapo.rewards.loading import PACKAGE, Canary, describe, ready_name, tail

HEADER = struct.Struct(">I")
EXIT_MEMORY = 77  # exit status of a child at its memory limit
DENIED = "Operation not permitted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Describes one response to be scored. Made by the reward pool, consumed by a child."""

    source: str
    text: str
    ground_truth: str
    extra_info: dict[str, Any]

    def request(self, reads_last: int | None) -> dict[str, Any]:
        """Returns what goes to the child; of the text, only the end that the functions read."""
        return {
            "source": self.source,
            "text": tail(self.text, reads_last),
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }


def pack(value: Any) -> bytes:
    """Returns a frame. Numpy's values become Python's; what JSON has no form for becomes text."""
    image = json.dumps(value, default=_plain).encode("ascii")
    return HEADER.pack(len(image)) + image


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def read_frame(channel: socket.socket) -> Any:
    """Waits for the next value and returns it; None at the end of the stream."""
    header = _read(channel, HEADER.size)
    return None if header is None else json.loads(_read(channel, HEADER.unpack(header)[0]) or b"null")


def _read(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def main() -> None:
    """Runs until the reward worker closes its end."""
    sandbox.die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = read_frame(control)
    specs = [RewardFunctionConfig(**spec) for spec in settings["functions"]]
    try:
        functions = RewardFunctions(specs)
        _warm_up(functions, specs)
    except Exception as error:  # a person's module may raise anything; the message names the key
        message = str(error) if isinstance(error, ValueError | RewardFunctionError) else describe(error)
        control.sendall(pack({"error": message}))
        return
    gc.collect()
    sandbox.live_without_parent()  # from here on the end of `control` tells, and the children are ended with it
    gc.freeze()  # the children share these pages as long as no process writes to them
    about = {
        "pid": os.getpid(),
        "digest": functions.digest,
        "reads_last": functions.reads_last,
        "at_limit": asdict(functions.at_limit("")),
        "canaries": [{"label": label, "canary": asdict(canary)} for label, canary in functions.canaries()],
        "without_canary": functions.without_canary(),
    }
    control.sendall(pack(about))
    _serve(control, functions, LimitsConfig(**settings["limits"]))


def _warm_up(functions: RewardFunctions, specs: list[RewardFunctionConfig]) -> None:
    """Lets ready functions do here, and not in each child, what they do once (tables of parsers). A person's function
    might start threads, which do not survive a fork."""
    ready = {label for label, spec in zip(functions.labels, specs, strict=True) if ready_name(spec.path)}
    for label, canary in functions.canaries():
        if label in ready:
            functions.score_alone(label, canary)


def _serve(control: socket.socket, functions: RewardFunctions, limits: LimitsConfig) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    running: set[int] = set()
    watched: list[socket.socket | int] = [control, wake_read]
    while True:
        readable, _, _ = select.select(watched, [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            _report_ends(control, running)
        if control in readable:
            request, channels, _, _ = socket.recv_fds(control, 1, 1)
            if not request:
                for pid in running:
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # with what a function was allowed to start
                return
            pid = os.fork()
            if pid == 0:
                _become_child(channels[0], functions, limits, keep_out=[control.fileno(), wake_read, wake_write])
            os.close(channels[0])
            with suppress(OSError):  # it has done so itself, or has ended
                os.setpgid(pid, pid)
            running.add(pid)


def _report_ends(control: socket.socket, running: set[int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        running.discard(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it was allowed to start
        # Negative: the signal that ended it.
        control.sendall(pack({"pid": pid, "exit": os.waitstatus_to_exitcode(status)}))


def _become_child(fd: int, functions: RewardFunctions, limits: LimitsConfig, keep_out: list[int]) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in keep_out:
            os.close(other)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)  # what a function prints may be the model's text, which no log shall hold
        channel = socket.socket(fileno=fd)
        granted = sandbox.apply(limits)
        channel.sendall(pack({"pid": os.getpid(), "granted": granted, "clock": time.process_time()}))
        _score_items(channel, functions, limits.cpu_s)
        status = 0
    finally:
        os._exit(status)


def _score_items(channel: socket.socket, functions: RewardFunctions, cpu_s: float) -> None:
    """Scores one item after the other. The timer counts CPU time and ends the process by SIGPROF, however busy its
    machine and deep in C its code: the parent reads that as the CPU limit."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while (item := read_frame(channel)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        began = time.process_time()
        try:
            verdict = _verdict(functions, item)
        except MemoryError:
            os._exit(EXIT_MEMORY)  # nothing that a frame would need memory for, and no further item in this process
        verdict["number"] = item.get("number")
        verdict["threads"] = threading.active_count() > 1  # one that goes on spends the CPU time of the next item
        verdict["clock"] = time.process_time()
        verdict["cpu_s"] = verdict["clock"] - began
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(pack(verdict))


def _verdict(functions: RewardFunctions, item: dict[str, Any]) -> dict[str, Any]:
    try:
        if "label" in item:
            return {"score": functions.score_alone(item["label"], Canary(**item["canary"]))}
        score = functions.score(item["source"], item["text"], item["ground_truth"], item["extra_info"])
        return asdict(score)
    except MemoryError:
        raise
    except Exception as error:  # the functions' own come as RewardFunctionError; what they give may raise too
        if DENIED in str(error):  # EPERM, as the filter gives it
            return {
                "error": f"{error}; network and new processes are denied to reward functions "
                "(`reward.limits.allow_network`, `reward.limits.allow_processes`)"
            }
        return {"error": str(error) if isinstance(error, RewardFunctionError) else describe(error)}


if __name__ == "__main__":
    assert __package__ == PACKAGE, "run as a module: `math.py` next to this file would shadow the standard library's"
    main()
