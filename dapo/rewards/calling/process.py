"""Starts, calls and ends the fork server and its children. Both run `dapo.rewards.calling.fork_server`."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo.config.reward import LimitsConfig
from dapo.ground.redact import redacted
from dapo.rewards.calling.frames import EXIT_MEMORY, HEADER, MAX_REPLY_BYTES, pack

START_S = 120.0  # for importing the reward functions
MAX_FAILED_STARTS = 8  # in a row, of one process; the pauses between them sum to 11 s
PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # after a failed start; doubles
FORK_S = 20.0
REPORT_S = 5.0  # longest time from the end of a child's stream to its exit status
LIMITS = {-signal.SIGPROF: "cpu", EXIT_MEMORY: "memory"}  # meaning of exit statuses; all others are crashes
COMPUTES = 0.25  # share of the CPU limit above which a running process counts as computing, not waiting
READ_ERRORS = (
    *(asyncio.IncompleteReadError, ConnectionError),  # it ended
    *(ValueError, KeyError, TypeError, RecursionError, OverflowError),  # a function has written to the socket
)


class Child:
    """One process that scores. failure: why it ended, in the terms of `Score.failure`; "" while it lives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = 0
        self.granted: list[str] = []
        self.failure = ""
        self.lost = ""  # internal error that it reported itself
        self.exit_status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.scored = 0
        self.since_canary = 0
        self.has_threads = False  # left behind by a function
        self.check_wanted: asyncio.Future[None] | None = None
        self.wake: Callable[[], None] = lambda: None  # called when it ends while idle
        self._asked = 0
        self._clock = 0.0  # CPU seconds at its last message
        self._reader = reader
        self._writer = writer

    @property
    def detail(self) -> str:
        if self.lost:
            return self.lost
        if self.failure == "wall":
            return "its process gave no verdict within `reward.limits.wall_s` and was killed"
        status = self.exit_status.result() if self.exit_status.done() else None
        return f"its process ended ({self.failure}, exit status {'unknown' if status is None else status})"

    async def ask(self, request: dict[str, Any], limits: LimitsConfig) -> dict[str, Any] | None:
        """Returns the reply, or None if the process ended first: see `failure`."""
        self._asked += 1
        try:
            self._writer.write(pack({**request, "number": self._asked}))
            async with asyncio.timeout(limits.wall_s):
                reply = await _read_frame(self._reader)
            if reply["number"] != self._asked:
                raise ValueError("a reply to another item")
            self._clock = float(reply["clock"])
            self.has_threads = bool(reply["threads"])
            if "lost" not in reply:
                return reply
            self.lost = str(reply["lost"])
            self.end("crash")
        except TimeoutError:
            if self.exit_status.done():  # a process that it started keeps the socket open
                self.end(LIMITS.get(self.exit_status.result(), "crash"))
            # On a busy machine the wall limit may come before the CPU limit: "cpu" if it computed all the time.
            self.end("cpu" if self._computes(limits.cpu_s * COMPUTES) else "wall")
        except READ_ERRORS:
            self.end(await self.cause_of_end())
        return None

    async def cause_of_end(self) -> str:
        """Kills the process if it still runs, and returns the failure that its exit status means (`LIMITS`)."""
        self.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.exit_status), REPORT_S)
        return LIMITS.get(self.exit_status.result(), "crash") if self.exit_status.done() else "crash"

    def send(self, request: dict[str, Any]) -> None:
        """Sends a request to a process that replies in any order. Raises ConnectionError."""
        self._writer.write(pack(request))

    async def receive(self) -> dict[str, Any]:
        """Returns the next reply of such a process. Raises one of `READ_ERRORS`."""
        return await _read_frame(self._reader)

    async def hello(self) -> None:
        """Waits for its first message. Raises RuntimeError if none comes."""
        try:
            async with asyncio.timeout(FORK_S):
                words = await _read_frame(self._reader)
        except (TimeoutError, *READ_ERRORS) as error:
            self.end("crash")
            late = isinstance(error, TimeoutError)
            how = f"within {FORK_S:g} s" if late else "(is a limit of processes or memory reached?)"
            raise RuntimeError(f"a reward child did not start {how}") from None
        self.pid, self.granted, self._clock = words["pid"], words["granted"], words["clock"]

    def exited(self, status: int) -> None:
        """Records its exit status and wakes whoever waits to feed it."""
        if not self.exit_status.done():
            self.exit_status.set_result(status)
        self.wake()

    def _computes(self, at_least_s: float) -> bool:
        """Whether it is runnable and has used this much CPU time since its last message."""
        try:
            state, used = state_and_cpu(self.pid)
        except OSError:
            return False
        return state == "R" and used - self._clock >= at_least_s

    def end(self, failure: str) -> None:
        self.failure = self.failure or failure
        self.kill()
        self._writer.close()

    def kill(self) -> None:
        """Sends SIGKILL, unless its exit is known: another process may have its process id by then."""
        if self.pid and not self.exit_status.done():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # includes processes that a function was allowed to start


async def pause(failed_starts: int) -> None:
    """Waits after consecutive failed starts: the cause may be temporary."""
    await asyncio.sleep(min(PAUSE_S * 2 ** (failed_starts - 1), LONGEST_PAUSE_S))


class ForkServer:
    """Imports the reward functions and forks children on request. Its children end with it. about: its pid, and of the
    functions: digest, reads_last, canaries, without_canary, at_limit."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        self.about: dict[str, Any] = {}
        self.gone = asyncio.Event()
        self._process = process
        self._control = control
        self._writer: asyncio.StreamWriter | None = None
        self._children: dict[int, Child] = {}
        self._early: dict[int, int] = {}  # exits of children whose process id is not known yet
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, settings: dict[str, Any]) -> "ForkServer":
        """Starts the process and waits until it has imported the functions. Raises ValueError if one cannot be loaded,
        RuntimeError if the process does not start."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "dapo.rewards.calling.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(network=bool(settings["limits"]["allow_network"])),
                start_new_session=True,  # only the driver handles Ctrl-C
            )
        self = cls(process, ours)
        try:
            reader = await self._greet(settings)
        except BaseException:
            self.kill()
            raise
        self._listener = asyncio.create_task(self._listen(reader))
        return self

    async def _greet(self, settings: dict[str, Any]) -> asyncio.StreamReader:
        self._control.sendall(pack(settings))
        reader, self._writer = await asyncio.open_unix_connection(sock=self._control)
        where = "its output is in this worker's log"
        try:
            async with asyncio.timeout(START_S):
                self.about = await _read_frame(reader)
        except TimeoutError:
            raise RuntimeError(f"the reward functions were not imported within {START_S:g} s; {where}") from None
        except READ_ERRORS:
            raise RuntimeError(f"the process that imports the reward functions ended; {where}") from None
        if "error" in self.about:
            raise ValueError(self.about["error"])
        return reader

    async def fork(self) -> Child:
        """Returns a new child, ready for items. Raises RuntimeError."""
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise RuntimeError(f"the fork server of the reward children is gone ({error})") from None
        finally:
            theirs.close()
        child = Child(*await asyncio.open_unix_connection(sock=ours))
        await child.hello()
        self._children[child.pid] = child
        if child.pid in self._early:
            self._exited(child.pid, self._early.pop(child.pid))
        return child

    def kill(self) -> None:
        """Kills the fork server; the kernel then kills its children."""
        if self._listener is not None:
            self._listener.cancel()
        if self._writer is not None:
            self._writer.close()
        else:
            self._control.close()
        self._end()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(*READ_ERRORS):
            while True:
                report = await _read_frame(reader)
                self._exited(report["pid"], report["exit"])
        self._end()

    def _exited(self, pid: int, status: int) -> None:
        child = self._children.pop(pid, None)
        if child is None:
            self._early[pid] = status
        else:
            child.exited(status)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.gone.set()
        for child in list(self._children.values()):
            child.exited(-signal.SIGKILL)
        self._children.clear()


def state_and_cpu(pid: int) -> tuple[str, float]:
    """Returns the state of a process (R: running or runnable) and its CPU time in seconds, see proc(5). Raises OSError
    if the process does not exist."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime


async def _read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Returns the next frame. Raises ValueError if it is malformed."""
    size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
    if size > MAX_REPLY_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    value = json.loads(await reader.readexactly(size))
    if not isinstance(value, dict):
        raise ValueError("a frame that is no object")
    return value


def _environment(*, network: bool) -> dict[str, str]:
    """Returns an environment with one thread per library, no GPU, and this process's import path. The processes read
    model output, so they get no Ray token, and no secrets unless they may use the network. Python warnings are off,
    because they would quote that output in the worker's log."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_AUTH_") and (network or redacted(value, name) == value)
    }
    path = os.pathsep.join(entry for entry in sys.path if entry)
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return {**kept, **threads, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
