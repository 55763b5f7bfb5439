"""The stream between a run and an engine outside of its Ray cluster.

    engine ── TLS 1.3 ──────────────────────────▶ driver    with the driver's certificate
           ── 32 random bytes ──────────────────▶
           ◀────────────────── 32 random bytes ──
           ── HMAC(token, random bytes) ────────▶           wrong: refused, closed
           ◀── HMAC(token, random bytes) ────────           or zeros: refused
           ◀── frames: length, number, msgpack ─▶

Until an end has proved that it knows the token, it can send these bytes alone, whose number is fixed: no length is
believed, nothing is decoded. The first frame's number depends on token and random bytes, so a frame that comes twice,
or from another connection, ends the connection. Values are decoded into the types below, never evaluated.
"""

import asyncio
import hmac
import secrets
import socket
import ssl
import struct
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from dapo.config.sampling import OutsideConfig
from dapo.types import Int32Array, Response, Sampling
from dapo.workers.engines.worker import Start
from dapo.workers.weights.bucket import Bucket

MAGIC = b"dapo engine 1\n"
RANDOM_BYTES = PROOF_BYTES = 32
HELLO_S = 20.0  # for TLS and the proofs together
MAX_FRAME_BYTES = 1 << 26  # a response of 20k tokens with the log-probabilities of 50 tokens each takes 9 MB
MIN_TOKEN_BYTES = 16
_HEADER = struct.Struct(">IQ")


class Refused(RuntimeError):
    """The other end is not let in, or broke the rules of the stream."""


class _Message(msgspec.Struct, tag=True):
    call: int


class Begin(_Message, tag=True):
    """To the engine: start, with these arguments of vLLM, if its model has this `fingerprint`."""

    arguments: dict[str, Any]
    model: dict[str, str]


class Beat(_Message, tag=True):
    """To the engine: return a `Pulse`."""


class Generate(_Message, tag=True):
    key: str
    prompt: Int32Array
    sampling: Sampling
    starts: list[Start]


class Abort(_Message, tag=True):
    keys: list[str]


class Fetch(_Message, tag=True):
    """To the engine: get this bucket from the store, unless it is there."""

    bucket: Bucket


class Load(_Message, tag=True):
    """To the engine: serve `version`, which these buckets hold."""

    version: int
    keep: bool
    buckets: list[Bucket]


class Part(_Message, tag=True):
    """To the driver: one response of a `Generate`."""

    number: int
    response: Response


class Answer(_Message, tag=True):
    """To the driver: the result of a call, which ends it."""

    value: msgspec.Raw


class Failed(_Message, tag=True):
    """To the driver: what ended a call."""

    reason: str


class Leaving(_Message, tag=True):
    """To the driver: the engine takes no more groups, and ends soon."""


def _as_bytes(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str.encode() + value.tobytes()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _array(kind: Any, data: Any) -> Any:
    if not isinstance(data, bytes):
        raise ValueError(f"{type(data).__name__} came for an array")
    [scalar] = get_args(get_args(kind)[1])
    head = np.dtype(scalar).str.encode()
    if not data.startswith(head):
        raise ValueError(f"an array of {data[: len(head)]!r} came, not of {head!r}")
    return np.frombuffer(data, dtype=scalar, offset=len(head))


encode = msgspec.msgpack.Encoder(enc_hook=_as_bytes).encode
_TO_ENGINE, _TO_DRIVER = Begin | Beat | Generate | Abort | Fetch | Load, Part | Answer | Failed | Leaving
to_engine: Any = msgspec.msgpack.Decoder(_TO_ENGINE, dec_hook=_array).decode
to_driver: Any = msgspec.msgpack.Decoder(_TO_DRIVER, dec_hook=_array).decode


def server_context(certificate: str, private_key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, private_key)
    return context


def client_context(ca: str) -> ssl.SSLContext:
    """ca: file of the only authorities whose certificates are accepted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it checks the certificate and its host name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(ca)
    return context


def secrets_of(cfg: OutsideConfig) -> tuple[ssl.SSLContext, bytes]:
    """Returns what the driver's end needs. Raises ValueError if a file is missing, unusable or not private."""
    try:
        _check_private(cfg.key_file)
        return server_context(cfg.certificate_file, cfg.key_file), read_token(cfg.token_file)
    except (OSError, ValueError) as error:
        files = f"certificate_file {cfg.certificate_file}, key_file {cfg.key_file}, token_file {cfg.token_file}"
        raise ValueError(f"`rollout.outside` ({files}): {error}") from error


def _check_private(path: str) -> None:
    if Path(path).stat().st_mode & 0o077:
        raise ValueError(f"{path} can be read by others; make it private: chmod 600 {path}")


def read_token(path: str) -> bytes:
    """Raises ValueError for a file that others may read, or a token that could be guessed."""
    _check_private(path)
    token = Path(path).read_bytes().strip()
    if len(token) < MIN_TOKEN_BYTES:
        raise ValueError(
            f"the token in {path} has {len(token)} characters, and needs {MIN_TOKEN_BYTES}; make one: "
            f"openssl rand -hex 32 > {path}"
        )
    return token


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Ends the connection within a minute if the other end is gone without a word."""
    socket_of = writer.get_extra_info("socket")
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
    ):
        socket_of.setsockopt(level, option, value)


class Frames:
    """The messages of an authenticated connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, *, own: bytes, other: bytes,
        randoms: bytes,
    ) -> None:  # fmt: skip
        self._reader, self._writer = reader, writer
        keep_alive(writer)
        # 56 bits: no counter runs over.
        self._sent, self._heard = (int.from_bytes(_mac(token, b"frames " + who, randoms)[:7]) for who in (own, other))

    async def send(self, message: Any) -> None:
        body = encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
        self._writer.write(_HEADER.pack(len(body), self._sent) + body)
        self._sent += 1
        await self._writer.drain()

    async def receive(self) -> bytes:
        length, number = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
        if number != self._heard:
            raise Refused("a message came twice or out of order")
        if length > MAX_FRAME_BYTES:
            raise Refused(f"a message has {length} bytes, more than {MAX_FRAME_BYTES}")
        self._heard += 1
        return await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.transport.abort()


def _mac(token: bytes, what: bytes, randoms: bytes) -> bytes:
    return hmac.digest(token, what + randoms, "sha256")


async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> Frames:
    """The driver's half of the proofs, over TLS. Raises Refused."""
    own = secrets.token_bytes(RANDOM_BYTES)
    hello = await reader.readexactly(len(MAGIC) + RANDOM_BYTES)
    if not hello.startswith(MAGIC):
        raise Refused("it speaks another protocol")
    writer.write(own)
    randoms = hello[len(MAGIC) :] + own
    if not hmac.compare_digest(await reader.readexactly(PROOF_BYTES), _mac(token, b"engine", randoms)):
        writer.write(bytes(PROOF_BYTES))
        await writer.drain()
        raise Refused("it does not know the token")
    writer.write(_mac(token, b"driver", randoms))
    return Frames(reader, writer, token, own=b"driver", other=b"engine", randoms=randoms)


async def connect(host: str, port: int, tls: ssl.SSLContext, token: bytes) -> Frames:
    """The engine's half. Raises Refused, or OSError if there is no driver with the right certificate."""
    async with asyncio.timeout(HELLO_S):
        reader, writer = await asyncio.open_connection(host, port, ssl=tls)
        try:
            own = secrets.token_bytes(RANDOM_BYTES)
            writer.write(MAGIC + own)
            randoms = own + await reader.readexactly(RANDOM_BYTES)
            writer.write(_mac(token, b"engine", randoms))
            proof = await reader.readexactly(PROOF_BYTES)
            if not any(proof):
                raise Refused("the driver refuses this token")
            if not hmac.compare_digest(proof, _mac(token, b"driver", randoms)):
                raise Refused("the driver does not know the token")
        except BaseException:
            writer.transport.abort()
            raise
    return Frames(reader, writer, token, own=b"engine", other=b"driver", randoms=randoms)
