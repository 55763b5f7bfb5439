"""Sends values between processes as JSON preceded by its length in 4 bytes. Unlike pickle, received data cannot run
code. A small value that travels with descriptors is sent as one piece, without its length."""

import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

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
