"""The records of a sandbox run (program, outcome, confinement) and how they travel: as JSON preceded by its length in 4
bytes. Unlike pickle, received data cannot run code. A small value that travels with descriptors is one piece, without
its length."""

import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SOURCE_NAME = "program.py"  # in tracebacks
FILES = ("landlock", "mounts")  # file confinements, best first


class SandboxError(RuntimeError):
    """The sandbox failed, not the program. There is no outcome; a retry may succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A Python program to run in the sandbox. function: called after the program has run, a method of its class
    `Solution` or a top-level function; "": none. arguments: of that call, JSON values. familiar: predefine standard
    library names that solutions of exercises use without an import (`List`, `defaultdict`, ...)."""

    source: str
    stdin: str = ""
    function: str = ""
    arguments: tuple[Any, ...] = ()
    familiar: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a program. Made by the sandbox; everything except the measurements is controlled by the program.

    stdout, stderr: decoded, at most `output_bytes` of each. result: JSON text of the function's return value; ""
    without one. exit: exit status; negative: the signal that ended it. reason: why it was stopped: `cpu`, `wall`,
    `output`, `files`, `threads`; "" if it ended by itself. cpu_s: CPU time in seconds. wall_s: seconds from its start,
    without waits for a core.
    """

    stdout: str
    stderr: str
    result: str
    exit: int
    reason: str
    cpu_s: float
    wall_s: float

    @property
    def succeeded(self) -> bool:
        return not self.reason and self.exit == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Confinement:
    """How programs are confined. files: `landlock`, `mounts`, or "" for unconfined. calls: whether system calls are
    filtered. own_user: whether each program runs as its own user (needs root)."""

    files: str
    calls: bool
    own_user: bool

    def describe(self) -> str:
        files = {
            "landlock": "Landlock shows them no file but their own and Python's",
            "mounts": "a private mount namespace shows them no file but their own and Python's",
            "": "they can read and write FILES of this user (`reward.limits.allow_unconfined`)",
        }[self.files]
        calls = (
            "seccomp allows no network, process or signal"
            if self.calls
            else "no filter of system calls (`reward.limits.allow_unconfined`)"
        )
        return f"{files}, {calls}" + (", each as a user of its own" if self.own_user else "")


HEADER = struct.Struct(">I")
MAX_PIECE = 4096


def pack(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    image = json.dumps(value, default=default).encode("ascii")
    return HEADER.pack(len(image)) + image


def read_frame(channel: socket.socket) -> Any:
    """Waits for the next value; returns None at the end of the stream."""
    header = _read(channel, HEADER.size)
    return None if header is None else json.loads(_read(channel, HEADER.unpack(header)[0]) or b"null")


def send_piece(channel: socket.socket, value: Any, descriptors: Sequence[int]) -> None:
    image = json.dumps(value).encode("ascii")
    assert len(image) <= MAX_PIECE, "a long value goes as a frame"
    socket.send_fds(channel, [image], list(descriptors))


def receive_piece(channel: socket.socket, descriptors: int) -> tuple[Any, list[int]]:
    """Waits for a value sent as one piece; returns (value, descriptors). The value is None at the end of the stream."""
    image, handles, _, _ = socket.recv_fds(channel, MAX_PIECE, descriptors)
    return (json.loads(image) if image else None), handles


def contents(descriptor: int, most: int) -> bytes:
    """Returns at most `most` bytes of a file from its start, and closes it."""
    try:
        return os.pread(descriptor, most, 0)
    finally:
        os.close(descriptor)


def _read(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
