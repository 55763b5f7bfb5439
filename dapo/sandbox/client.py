"""Runs programs in the sandbox; the public interface of this package.

    with Sandbox(limits) as sandbox:
        outcome = sandbox.run(Program(source="print(int(input()) + 1)", stdin="41"))

Returns the `Outcome` of a `Program`, or raises `SandboxError` if the sandbox failed rather than the program.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from dapo.config.reward import SandboxConfig
from dapo.sandbox.program import (
    FILES,
    Confinement,
    Outcome,
    Program,
    SandboxError,
    contents,
    pack,
    read_frame,
    receive_piece,
    send_piece,
)
from dapo.sandbox.server import SETUP_S, longest_s

START_S = 120.0  # for importing packages and probing the confinements
LOOK_MS = 1000  # interval of checks whether the server is alive
_SERVER = "dapo.sandbox.server"


class Sandbox:
    """A server that runs programs, any number at once. The process that created it restarts the server when it ends;
    forked processes may use it too. way: how programs are confined."""

    def __init__(self, limits: SandboxConfig, *, allow_unconfined: bool = False, files: Sequence[str] = FILES) -> None:
        """Starts the server and waits until a probe has been confined. files: file confinements in the order to try.
        Raises ValueError if no confinement works or a package is not installed; SandboxError if the server does not
        start."""
        self.limits = limits
        self._settings = {"packages": limits.packages, "allow_unconfined": allow_unconfined, "files": list(files)}
        self._requests, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(SETUP_S)  # in case the server hangs
        self._owner = os.getpid()
        self._reviving = threading.Lock()
        self._server = self._start()
        try:
            self.way = self._greeting()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._server.pid

    def descriptors(self) -> list[int]:
        """Returns descriptors that forked processes should close."""
        return [self._theirs.fileno()]

    def restart(self) -> None:
        self._hello.close()
        self._server = self._start()

    def close(self) -> None:
        self._hello.close()
        self._requests.close()
        self._theirs.close()
        if os.getpid() == self._owner:
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(SETUP_S)  # gives it time to remove its directory
            self._server.kill()
            self._server.wait()

    def run(self, program: Program, limits: SandboxConfig | None = None) -> Outcome:
        """limits: replace the sandbox's own, except `packages`. Raises SandboxError if the sandbox failed twice; this
        is not the program's fault."""
        frame = pack(asdict(program))
        try:
            return self._try(frame, limits or self.limits)
        except SandboxError:  # try once more
            return self._try(frame, limits or self.limits)

    def _try(self, frame: bytes, limits: SandboxConfig) -> Outcome:
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(SETUP_S)
            try:
                with theirs:
                    send_piece(self._requests, asdict(limits), [theirs.fileno()])
                with suppress(BrokenPipeError, ConnectionResetError):  # then the reply has the reason
                    ours.sendall(frame)
                self._wait(ours, time.monotonic() + 2 * SETUP_S + longest_s(limits))
                reply, handles = receive_piece(ours, 3)
            except OSError as error:
                raise SandboxError(f"the sandbox gave no outcome ({type(error).__name__}: {error})") from None
        if reply is None:
            raise SandboxError("the sandbox's server ended while the program ran")
        if "error" in reply:
            raise SandboxError(f"the sandbox failed: {reply['error']}")
        stdout, stderr, result = (
            contents(handle, limits.output_bytes).decode("utf-8", "replace") for handle in handles
        )
        return Outcome(stdout=stdout, stderr=stderr, result=result, **reply)

    def _wait(self, channel: socket.socket, deadline: float) -> None:
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        while not poll.poll(LOOK_MS):
            self._revive()
            if time.monotonic() > deadline:
                raise TimeoutError("no answer in time")

    def _revive(self) -> None:
        with self._reviving:
            if os.getpid() == self._owner and self._server.poll() is not None:
                self.restart()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._hello, theirs = socket.socketpair()
        with theirs:
            handles = [self._theirs.fileno(), theirs.fileno()]
            return subprocess.Popen(
                [sys.executable, "-m", _SERVER, *map(str, handles), json.dumps(self._settings)],
                pass_fds=handles,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(os.environ),
                cwd="/",
            )

    def _greeting(self) -> Confinement:
        self._hello.settimeout(START_S)
        try:
            words: dict[str, Any] | None = read_frame(self._hello)
        except OSError as error:
            raise SandboxError(f"the sandbox's server did not start within {START_S:g} s ({error})") from None
        if words is None:
            raise SandboxError("the sandbox's server ended at its start; its output is in this process's log")
        if "error" in words:
            raise ValueError(words["error"])
        return Confinement(**words)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the server's environment, without secrets. One thread per library; one allocator arena, because each
    further one takes 64 MiB of a program's address space; a fixed hash seed, so that programs are reproducible."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
    threads = {name: "1" for name in names}
    kept = {name: variables[name] for name in ("LD_LIBRARY_PATH", "TMPDIR", "PYTHONHOME") if name in variables}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return {**kept, **threads, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}


_sandboxes: list[Sandbox] = []  # at most one


def start(limits: SandboxConfig, *, allow_unconfined: bool = False) -> Sandbox:
    while _sandboxes:
        _sandboxes.pop().close()
    _sandboxes.append(Sandbox(limits, allow_unconfined=allow_unconfined))
    return _sandboxes[0]


def run(program: Program) -> Outcome:
    """Raises SandboxError if the sandbox failed, not the program."""
    return current().run(program)


def current() -> Sandbox:
    return _sandboxes[0] if _sandboxes else start(SandboxConfig())
