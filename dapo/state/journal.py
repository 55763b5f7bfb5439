"""Keeps what finished since the last checkpoint: a file of records to which a thread appends.

    append ─▶ queue ─▶ thread: encode, write, sync ─▶ journal/after_VERSION.log ─▶ read

The event loop never waits for it. Each record has a frame of length, digest and bytes; the digest is keyed by the
settings of the run. Reading a file ends at the first frame that is torn, damaged or of other settings.

A segment opens when a checkpoint captures the state, so that `after_VERSION.log` and later ones hold what that
checkpoint lacks.
"""

import contextlib
import hashlib
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from dapo.ground.durable import sync_directory
from dapo.state.manifest import readable

JOURNAL = "journal"
FORMAT = 2  # of frames and their content; other formats are not read
LENGTH_BYTES, DIGEST_BYTES = 8, 16
HEAD_BYTES = LENGTH_BYTES + DIGEST_BYTES
NAME = re.compile(r"after_(\d{6,})\.log")
TEMPORARY = ".tmp"
CLOSE_S = 30.0
MAX_WAITING = 1000  # records in memory while a slow disk is behind; further ones are left out

Encode = Callable[[], bytes]


class Journal:
    """Appends to the journal of one run directory, which only the process that holds the directory may. Except for
    `read`, file errors are not raised: a failed write is reported once and ends the segment, and the next segment tries
    again."""

    def __init__(self, directory: Path, settings: str, *, warn: Callable[[str], None]) -> None:
        """settings: what the records depend on; records of other settings are not read. warn: receives one line."""
        self.version = -1  # checkpoint that the open segment follows; -1: none is open
        self._directory = directory
        self._key = hashlib.blake2b(f"{FORMAT}/{settings}".encode()).digest()
        self._warn = warn
        self._queue: queue.SimpleQueue[Encode | tuple[Path, str] | None] = queue.SimpleQueue()  # tuple: a segment
        self._thread: threading.Thread | None = None

    def read(self, version: int) -> list[bytes]:
        """Returns the records of all segments from `version` on, and warns of damage. Raises Unreadable."""
        records: list[bytes] = []
        for path in self._segments(version):
            data = readable(path.read_bytes, path)
            found, lost = whole_records(data, self._key)
            records += found
            if lost:
                lines = f"{lost} of {len(data)} bytes of {path} are damaged or of other settings"
                self._warn(f"groups of the journal are generated again: {lines}")
        return records

    def restart(self, version: int, records: Sequence[bytes]) -> None:
        """Begins anew after checkpoint `version` with a segment of `records`; removes later segments, which belong to
        an abandoned branch. At any moment `records` are in the files, old or new."""
        path = self._path(version)
        temporary = path.with_suffix(TEMPORARY)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.writelines(framed(record, self._key) for record in records)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_directory(self._directory)
            for later in self._segments(version + 1):
                later.unlink()
        except OSError as error:
            self._warn(f"no journal until the next checkpoint: {error}")
            return
        self._open(version, "ab")

    def begin(self, version: int) -> None:
        """What is appended from now on follows checkpoint `version`; called when its state is captured."""
        if version != self.version:
            self._open(version, "wb")

    def append(self, encode: Encode) -> None:
        """Queues one record; the thread calls `encode`. Drops it without an open segment."""
        if self.version >= 0 and self._queue.qsize() < MAX_WAITING:
            self._queue.put(encode)

    def prune(self, oldest: int, *, after: int = -1) -> None:
        """Removes the segments before `oldest`, of those after `after`."""
        for path in self._segments(after + 1):
            if _version_of(path) < oldest:
                with contextlib.suppress(OSError):
                    path.unlink()

    def remove(self) -> None:
        self.prune(sys.maxsize)

    def close(self) -> None:
        thread, self._thread, self.version = self._thread, None, -1
        if thread is None:
            return
        self._queue.put(None)
        thread.join(CLOSE_S)
        if thread.is_alive():
            self._warn(f"the journal under {self._directory} was not written to its end within {CLOSE_S:g} s")

    def _open(self, version: int, mode: str) -> None:
        self.version = version
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
            self._thread.start()
        self._queue.put((self._path(version), mode))

    def _write(self) -> None:
        file: IO[bytes] | None = None  # None: not open, or a write has failed
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, tuple):
                    _close(file)
                    file, (path, mode) = None, item
                    path.parent.mkdir(parents=True, exist_ok=True)
                    file = path.open(mode)
                    sync_directory(path.parent)
                elif file is not None:
                    file.write(framed(item(), self._key))
                    file.flush()
                    if self._queue.empty():
                        os.fsync(file.fileno())
            except Exception as error:  # of any kind: the run continues without a journal
                self._warn(f"no journal until the next checkpoint: {type(error).__name__}: {error}")
                _close(file)
                file = None
        _close(file)

    def _path(self, version: int) -> Path:
        return self._directory / f"after_{version:06d}.log"

    def _segments(self, version: int) -> list[Path]:
        if not self._directory.is_dir():
            return []
        paths = [path for path in self._directory.iterdir() if NAME.fullmatch(path.name)]
        return sorted((path for path in paths if _version_of(path) >= version), key=_version_of)


def holds_groups(output_dir: Path) -> bool:
    """Whether a run has left records in its directory, even damaged ones: they may have taken hours."""
    return any(path.stat().st_size for path in (output_dir / JOURNAL).glob("after_*.log"))


def framed(record: bytes, key: bytes) -> bytes:
    length = len(record).to_bytes(LENGTH_BYTES, "little")
    return b"".join((length, _digest(record, key), record))


def whole_records(data: bytes, key: bytes) -> tuple[list[bytes], int]:
    """Returns the records of a segment up to the first damaged one, and the number of bytes from there on."""
    records: list[bytes] = []
    start = 0
    while start < len(data):
        head = start + HEAD_BYTES
        end = head + int.from_bytes(data[start : start + LENGTH_BYTES], "little")
        record = data[head:end]
        if end > len(data) or _digest(record, key) != data[start + LENGTH_BYTES : head]:
            break
        records.append(record)
        start = end
    return records, len(data) - start


def _digest(record: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(record, key=key, digest_size=DIGEST_BYTES).digest()


def _close(file: IO[bytes] | None) -> None:
    if file is not None:
        with contextlib.suppress(OSError):
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):
            file.close()


def _version_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))
