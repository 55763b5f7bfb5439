"""Keeps what finished since the last checkpoint: a file of records to which a thread appends.

    append ─▶ queue ─▶ thread: encode, write at once, fsync once a second ─▶ journal/after_VERSION.log ─▶ read

The event loop never waits for it. Each record has its own frame of mark, length, digest and bytes; the digest is keyed
by the settings of the run. A frame that is torn, damaged or of other settings is skipped: reading goes on at the next
mark.

A segment opens when a checkpoint captures the state, so that `after_VERSION.log` and later ones hold what that
checkpoint lacks. If the process dies, all records that the thread has written are kept; if the machine crashes, those
of the last second or two are lost.
"""

import contextlib
import hashlib
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from dapo.ground.durable import NOT_THERE, TRIES, sync_directory, tried

JOURNAL = "journal"
FORMAT = 1  # of frames and their content; other formats are not read
MARK = b"\xff\xfeDAPO\xfe\xff"  # occurs neither in UTF-8 text nor in an array of token ids
LENGTH_BYTES, DIGEST_BYTES = 8, 16
HEAD_BYTES = len(MARK) + LENGTH_BYTES + DIGEST_BYTES
NAME = re.compile(r"after_(\d{6,})\.log")
TEMPORARY = ".tmp"
SYNC_S = 1.0
CLOSE_S = 30.0
MAX_WAITING_BYTES = 1 << 30  # held in memory while a slow disk is behind

Encode = Callable[[], bytes]


class UnreadableJournal(RuntimeError):
    """A segment cannot be read now and may be intact: a start must not write over it."""


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
        self._queue: queue.SimpleQueue[_Record | _Segment | None] = queue.SimpleQueue()  # None: the end
        self._put = self._taken = 0  # bytes, counted by the caller and by the thread
        self._thread: threading.Thread | None = None
        self._segment: _Segment | None = None
        self._behind = False

    def read(self, version: int) -> list[bytes]:
        """Returns the records of all segments from `version` on, and warns of damage. Raises UnreadableJournal."""
        records: list[bytes] = []
        damaged: list[str] = []
        for path in self._segments(version):
            try:
                data = tried(path.read_bytes)
            except NOT_THERE as error:
                damaged.append(f"{path} cannot be read ({error})")
                continue
            except OSError as error:
                raise UnreadableJournal(
                    f"{path} cannot be read ({error}; tried {TRIES} times) and may be whole all the same; see to the "
                    "disk or the rights and give the same command again; or move that file away, and its groups are "
                    "generated again"
                ) from error
            found, lost = whole_records(data, self._key)
            records += found
            if lost:
                damaged.append(f"{lost} of {len(data)} bytes of {path} are damaged or of other settings")
        if damaged:
            self._warn(f"groups of the journal are generated again: {'; '.join(damaged)}")
        return records

    def restart(self, version: int, records: Sequence[bytes]) -> None:
        """Begins anew after checkpoint `version` with a segment of `records`; removes later segments, which belong to
        an abandoned branch. At any moment `records` are in the files, old or new."""
        path = self._path(version)
        temporary = path.with_suffix(TEMPORARY)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                for record in records:
                    file.write(framed(record, self._key))
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
        elif self._segment is not None and self._segment.failed:
            self._open(version, "ab")

    def append(self, encode: Encode, size: int) -> None:
        """Queues one record; the thread calls `encode`. size: bytes held in memory until then. Drops the record without
        an open segment, and if the disk has failed or is far behind."""
        if self._segment is None or self._segment.failed:
            return
        waiting = self._put - self._taken
        if waiting and waiting + size > MAX_WAITING_BYTES:
            if not self._behind:
                self._warn(f"the journal leaves groups out: {self._directory} is {waiting >> 20} MiB behind")
            self._behind = True
            return
        self._put += size
        self._queue.put(_Record(encode, size))

    def prune(self, oldest: int) -> None:
        for path in self._segments(0):
            if _version_of(path) < oldest:
                with contextlib.suppress(OSError):
                    path.unlink()

    def remove(self) -> None:
        self.prune(sys.maxsize)

    def close(self) -> None:
        thread, self._thread, self._segment, self.version = self._thread, None, None, -1
        if thread is None:
            return
        self._queue.put(None)
        thread.join(CLOSE_S)
        if thread.is_alive():
            self._warn(f"the journal under {self._directory} was not written to its end within {CLOSE_S:g} s")

    def _open(self, version: int, mode: str) -> None:
        self.version, self._segment = version, _Segment(self._path(version), mode, self._key)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
            self._thread.start()
        self._queue.put(self._segment)

    def _write(self) -> None:
        segment: _Segment | None = None
        ended = False
        while not ended:
            item: _Record | _Segment | None = None
            try:
                item = self._queue.get(timeout=SYNC_S)
                ended = item is None
            except queue.Empty:
                pass
            try:
                if isinstance(item, _Segment):
                    if segment is not None:
                        segment.close()
                    segment = item
                    segment.open()
                elif segment is not None and not segment.failed:
                    if item is not None:
                        segment.append(item.encode())
                    segment.sync(at_once=ended)
            except Exception as error:  # of any kind: the run continues without a journal
                assert segment is not None
                segment.failed = True
                self._warn(f"no journal until the next checkpoint: {type(error).__name__}: {error}")
            if isinstance(item, _Record):
                self._taken += item.size
        if segment is not None:
            segment.close()

    def _path(self, version: int) -> Path:
        return self._directory / f"after_{version:06d}.log"

    def _segments(self, version: int) -> list[Path]:
        if not self._directory.is_dir():
            return []
        paths = [path for path in self._directory.iterdir() if NAME.fullmatch(path.name)]
        return sorted((path for path in paths if _version_of(path) >= version), key=_version_of)


class _Record(NamedTuple):
    encode: Encode
    size: int


class _Segment:
    def __init__(self, path: Path, mode: str, key: bytes) -> None:
        self.failed = False
        self._path = path
        self._mode = mode
        self._key = key
        self._file: IO[bytes] | None = None
        self._dirty = False
        self._synced_at = 0.0

    def open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open(self._mode, buffering=0)
        sync_directory(self._path.parent)

    def append(self, record: bytes) -> None:
        assert self._file is not None
        rest = memoryview(framed(record, self._key))
        while rest:
            rest = rest[self._file.write(rest) :]
        self._dirty = True

    def sync(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._file is not None and self._dirty and (at_once or now - self._synced_at >= SYNC_S):
            os.fsync(self._file.fileno())
            self._dirty, self._synced_at = False, now

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.sync(at_once=True)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def holds_groups(output_dir: Path) -> bool:
    """Whether a run has left records in its directory, even damaged ones: they may have taken hours."""
    return any(path.stat().st_size for path in (output_dir / JOURNAL).glob("after_*.log"))


def framed(record: bytes, key: bytes) -> bytes:
    length = len(record).to_bytes(LENGTH_BYTES, "little")
    return b"".join((MARK, length, _digest(length, record, key), record))


def whole_records(data: bytes, key: bytes) -> tuple[list[bytes], int]:
    """Returns the intact records of a segment, and the number of bytes that belong to none."""
    records: list[bytes] = []
    view = memoryview(data)
    lost = start = 0
    while start < len(data):
        at = data.find(MARK, start)
        if at < 0:
            at = len(data)
        lost += at - start
        head = view[at + len(MARK) : at + HEAD_BYTES]
        length, digest = head[:LENGTH_BYTES], head[LENGTH_BYTES:]
        end = at + HEAD_BYTES + int.from_bytes(length, "little")
        record = view[at + HEAD_BYTES : end]
        if at < len(data) and end <= len(data) and _digest(length, record, key) == digest:
            records.append(bytes(record))
            start = end
        else:
            start = min(at + 1, len(data))
            lost += start - at
    return records, lost


def _digest(length: bytes | memoryview, record: bytes | memoryview, key: bytes) -> bytes:
    digest = hashlib.blake2b(length, key=key, digest_size=DIGEST_BYTES)
    digest.update(record)
    return digest.digest()


def _version_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))
