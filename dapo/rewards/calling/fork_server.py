"""Imports the reward functions, forks the children: the fork server, `python -m dapo.rewards.calling.fork_server FD`.

    reward worker ──fork requests──▶ fork server  ──fork──▶ child   (limited, scores one response at a time)
         ▲  ▲──────pids and ends──────────┘                   │
         └─────────────────── JSON over a socket ─────────────┘

It is a new process, never forked from one that runs Ray, torch or threads. A child costs milliseconds, not an
import. Frames are JSON preceded by its length in 4 bytes: unlike pickle, a reply cannot run code.

This process receives one frame with the settings, then one byte and a socket per child. It sends one frame when it is
ready or has failed, then a frame per ended child. A child sends one frame at its start, then a score per item received.
"""

import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from dapo.config.reward import LimitsConfig, RemoteConfig, RewardFunctionConfig, SandboxConfig
from dapo.ground.user_code import describe
from dapo.rewards.calling import sandbox
from dapo.rewards.calling.by_entry import FunctionsByEntry
from dapo.rewards.calling.frames import EXIT_MEMORY, pack, read_frame
from dapo.rewards.calling.functions import RewardFunctionError
from dapo.rewards.calling.loading import Canary, tail
from dapo.sandbox import client, kernel
from dapo.sandbox.client import Sandbox
from dapo.sandbox.program import SandboxError

DENIED = "Operation not permitted"
MAX_CONNECTIONS = 4096  # open-file limit of a process with async functions


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One response to be scored. Made by the reward pool, consumed by a child. entry: as of its prompt. servers: the
    run's own judge servers, for async functions only (`dapo.rewards.calling.calls.servers`)."""

    source: str
    text: str
    ground_truth: str
    extra_info: dict[str, Any]
    entry: str = ""
    servers: Sequence[Mapping[str, str]] = ()

    def request(self, reads_last: int | None, **more: Any) -> dict[str, Any]:
        """Returns the request to the child; of the text, only the end that the functions read is included."""
        return {
            "source": self.source,
            "text": tail(self.text, reads_last),
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
            "entry": self.entry,
            **more,
        }


def main() -> None:
    kernel.die_with(os.getppid())
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = read_frame(control)
    given = settings["functions"]  # by entry of `data.sources`; "": all others
    specs = {name: [RewardFunctionConfig(**spec) for spec in each] for name, each in given.items()}
    limits = LimitsConfig(**{**settings["limits"], "sandbox": SandboxConfig(**settings["limits"]["sandbox"])})
    programs = None
    try:
        functions = FunctionsByEntry(specs.pop(""), specs)
        if functions.runs_programs:
            programs = client.start(limits.sandbox, allow_unconfined=limits.allow_unconfined)
        functions.warm_up()
    except Exception as error:  # a user-defined module may raise anything
        message = str(error) if isinstance(error, ValueError | RewardFunctionError) else describe(error)
        control.sendall(pack({"error": message}))
        return
    gc.collect()
    kernel.live_on()  # from here on, the end of `control` ends this process and the children
    gc.freeze()  # the children share these pages as long as no process writes to them
    about = {"pid": os.getpid(), **functions.about(), "programs": "" if programs is None else programs.way.describe()}
    control.sendall(pack(about))
    remote = RemoteConfig(**settings["remote"]) if "remote" in settings else None
    _serve(control, functions, limits, remote, programs)


def _serve(
    control: socket.socket,
    functions: FunctionsByEntry,
    limits: LimitsConfig,
    remote: RemoteConfig | None,
    programs: Sandbox | None,
) -> None:
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
            _report_ends(control, running, programs)
        if control in readable:
            request, channels, _, _ = socket.recv_fds(control, 1, 1)
            if not request:
                for pid in running:
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # includes processes started by a function
                if programs is not None:
                    programs.close()
                return
            try:
                pid = os.fork()
            except OSError:  # the worker sees the child's socket close and requests again
                os.close(channels[0])
                continue
            if pid == 0:
                keep_out = [control.fileno(), wake_read, wake_write, *(programs.descriptors() if programs else ())]
                _become_child(channels[0], functions, limits, remote, keep_out)
            os.close(channels[0])
            with suppress(OSError):  # the child has already done so, or has ended
                os.setpgid(pid, pid)
            running.add(pid)


def _report_ends(control: socket.socket, running: set[int], programs: Sandbox | None) -> None:
    while running or programs is not None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if programs is not None and pid == programs.pid:
            programs.restart()
            continue
        running.discard(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes started by the child
        # A negative exit is the signal that ended it.
        control.sendall(pack({"pid": pid, "exit": os.waitstatus_to_exitcode(status)}))


def _become_child(
    fd: int, functions: FunctionsByEntry, limits: LimitsConfig, remote: RemoteConfig | None, keep_out: list[int]
) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in keep_out:
            os.close(other)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)  # output may contain the model's text, which must not be logged
        channel = socket.socket(fileno=fd)
        granted = sandbox.apply(limits) if remote is None else sandbox.apply(limits, open_files=MAX_CONNECTIONS)
        channel.sendall(pack({"pid": os.getpid(), "granted": granted, "clock": time.process_time()}))
        if remote is None:
            _score_items(channel, functions, limits.cpu_s)
        else:
            from dapo.rewards.calling import calls  # imports asyncio, which other children do not need

            calls.serve(channel, functions, remote)
        status = 0
    finally:
        os._exit(status)


def _score_items(channel: socket.socket, functions: FunctionsByEntry, cpu_s: float) -> None:
    """Scores items one by one. A timer counts CPU time and ends the process by SIGPROF, even inside C code; the parent
    reports that as the CPU limit."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while (item := read_frame(channel)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        began = time.process_time()
        try:
            verdict = _verdict(functions, item)
        except MemoryError:
            os._exit(EXIT_MEMORY)  # sending a frame would need memory
        except SandboxError as error:
            verdict = {"lost": str(error)}  # not the item's fault: it is tried once more elsewhere
        verdict["number"] = item.get("number")
        verdict["threads"] = threading.active_count() > 1  # a running thread would use CPU time of the next item
        verdict["clock"] = time.process_time()
        verdict["cpu_s"] = verdict["clock"] - began
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(pack(verdict))


def _verdict(functions: FunctionsByEntry, item: dict[str, Any]) -> dict[str, Any]:
    try:
        if "label" in item:
            return {"score": functions.score_alone(item["label"], Canary(**item["canary"]))}
        own = functions.of(item["entry"])
        score = own.score(item["source"], item["text"], item["ground_truth"], item["extra_info"], item["given"])
        return asdict(score)
    except (MemoryError, SandboxError):
        raise
    except Exception as error:  # not only RewardFunctionError: processing results may raise too
        if DENIED in str(error):  # EPERM from the seccomp filter
            return {
                "error": f"{error}; network and new processes are denied to reward functions "
                "(`reward.limits.allow_network`, `reward.limits.allow_processes`)"
            }
        return {"error": str(error) if isinstance(error, RewardFunctionError) else describe(error)}


if __name__ == "__main__":
    main()
