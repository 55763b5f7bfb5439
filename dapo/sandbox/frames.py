"""Sends values between processes: JSON behind its length in 4 bytes, so that what comes is numbers and text, no pickle.

A small value that travels with descriptors goes as one piece, without its length.
"""

import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

HEADER = struct.Struct(">I")
MAX_PIECE = 4096


def pack(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """Returns a frame. default: turns what JSON has no form for into what it has one for."""
    image = json.dumps(value, default=default).encode("ascii")
    return HEADER.pack(len(image)) + image


def read_frame(channel: socket.socket) -> Any:
    """Waits for the next value and returns it; None at the end of the stream."""
    header = _read(channel, HEADER.size)
    return None if header is None else json.loads(_read(channel, HEADER.unpack(header)[0]) or b"null")


def send_piece(channel: socket.socket, value: Any, descriptors: Sequence[int]) -> None:
    """Sends a small value with descriptors, in one piece. Raises OSError."""
    image = json.dumps(value).encode("ascii")
    assert len(image) <= MAX_PIECE, "a long value goes as a frame"
    socket.send_fds(channel, [image], list(descriptors))


def receive_piece(channel: socket.socket, descriptors: int) -> tuple[Any, list[int]]:
    """Waits for a value in one piece, and returns it with its descriptors; None at the end of the stream."""
    image, handles, _, _ = socket.recv_fds(channel, MAX_PIECE, descriptors)
    return (json.loads(image) if image else None), handles


def contents(descriptor: int, most: int) -> bytes:
    """Returns at most so many bytes of a file from its beginning on, whatever its position, and closes it."""
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
