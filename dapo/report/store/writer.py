"""Writes into the database from one thread, so that no caller waits for a disk.

    put ─▶ queue, bounded ─▶ thread: a transaction each ─▶ samples.sqlite (write-ahead log)

Each queued function is written completely or not at all, also after kill -9. What cannot be written is skipped,
reported and counted; file errors are not raised.
"""

import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dapo.report.store.schema import GROWS, VERSION, statements

Write = Callable[[sqlite3.Connection], object]

# Memory of queued items. A step of 512 x 16 responses of which half are dropped has 0.85 GiB at 5k tokens each, 1.7 GiB
# at 10k: a second one fits if the first is written, or small.
MAX_WAITING_BYTES = 1 << 30
MAX_WAITING = 10_000
BUSY_S = 1.0  # of one try while another program has the database locked; tries are repeated
BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
PAUSE_S = 0.1  # between two tries: some of SQLite's refusals come at once
LOCKED_S = 10.0  # after which a lock is reported
LOG_BYTES = 1 << 26  # of the write-ahead log on disk after a large transaction
CACHE_KIB = 16 << 10
PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",  # no wait for the disk at each transaction
    "secure_delete = OFF",  # some builds overwrite free pages, through the log
    f"journal_size_limit = {LOG_BYTES}",
    f"cache_size = -{CACHE_KIB}",
)
TELL_S = 600.0  # between two warnings
SIDE_FILES = ("", "-wal", "-shm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One transaction. size: bytes held in memory. owed: if it fails now, it is done before anything later."""

    write: Write
    responses: int = 0
    size: int = 0
    owed: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Writer:
    def __init__(self, path: Path, *, warn: Callable[[str], None], guard: Callable[[], None]) -> None:
        """warn: receives one line. guard: raises if this process must not write any more."""
        self._path = path
        self._warn = warn
        self._guard = guard
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()  # None: the end
        self._lock = threading.Lock()  # over what follows
        self._size = 0  # bytes queued
        self._missing = self._missing_responses = 0  # transactions that were skipped
        self._told = self._noted = 0  # `_missing` at the last warning, and when last recorded
        self._told_at: float | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int, int] = (0, 0, 0)  # device, inode and size of the open file
        self._locked = False  # by another program
        self._owed: list[Item] = []
        self.on_missing: Callable[[str], Write] = lambda message: lambda connection: None  # makes a note of it

    def put(self, write: Write, *, responses: int = 0, size: int = 0, owed: bool = False) -> Item:
        """Queues a transaction; see `Item`. Skipped if too much is queued, unless it is owed, and after `close`."""
        item = Item(write=write, responses=responses, size=size, owed=owed)
        with self._lock:
            too_much = bool(self._size) and self._size + size > MAX_WAITING_BYTES or self._queue.qsize() >= MAX_WAITING
            taken = not self._closed and (owed or not too_much)
            self._size += size if taken else 0
        if taken:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
                self._thread.start()
            self._queue.put(item)
        else:
            item.done.set()
            if not self._closed:
                self._left_out(item, "the disk is too far behind")
        return item

    def flush(self, timeout_s: float) -> bool:
        """Waits until what was queued is on disk. Returns False after `timeout_s`, or while the database is locked."""
        if self._thread is None:
            return True
        done, until = self.put(_to_disk, owed=True).done, time.monotonic() + timeout_s
        while not done.wait(min(PAUSE_S, timeout_s)):
            if self._locked or time.monotonic() >= until:
                return False
        return True

    def close(self, timeout_s: float) -> None:
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        thread.join(timeout_s)
        if thread.is_alive():
            self._warn(f"{self._path} was not written to its end within {timeout_s:g} s")

    def _run(self) -> None:
        while self._take():
            pass  # keep no reference: groups of a step would stay in memory until the next one
        if self._told != self._missing:
            self._warn(f"{self._path}: {self._lacks()}")
        self._drop_connection()

    def _take(self) -> bool:
        item = self._queue.get()
        if item is None:
            return False
        try:
            self._write(item)
        except Exception as error:  # of any kind: the run continues without it
            self._drop_connection()
            if item.write is not _to_disk:
                self._left_out(item, f"{type(error).__name__}: {error}")
                self._owed += [item] if item.owed else []
        finally:
            with self._lock:
                self._size -= item.size
            item.done.set()
        return True

    def _write(self, item: Item) -> None:
        began, told = time.monotonic(), False
        try:
            while not self._tried(item):
                self._locked = True
                if not told and time.monotonic() - began >= LOCKED_S:
                    room = f"{MAX_WAITING_BYTES >> 20} MiB"
                    self._warn(f"{self._path} is locked by another program; up to {room} wait for it in memory")
                    told = True
                time.sleep(PAUSE_S)
        finally:
            self._locked = False

    def _tried(self, item: Item) -> bool:
        self._guard()
        try:
            self._write_or_begin_anew(item)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in BUSY:
                raise
            return False
        return True

    def _write_or_begin_anew(self, item: Item) -> None:
        try:
            self._transact_all(item)
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # subclasses mean a disk, a lock or a programming error
                raise
            self._drop_connection()
            self._warn(f"{self._path} is damaged ({error}); it is now {set_aside(self._path, 'damaged')}")
            self._transact_all(item)
        if item.write is not _to_disk:
            self._note_missing()

    def _transact_all(self, item: Item) -> None:
        while self._owed:
            self._transact(self._owed[0].write)
            del self._owed[0]
        self._transact(item.write)

    def _transact(self, write: Write) -> None:
        if self._connection is not None and not self._is_as_opened():
            self._let_go()
        if self._connection is None:
            self._connection = opened(self._path, self._warn)
            self._file = _identity(self._path)
        if write is _to_disk:
            write(self._connection)
            self._is_as_opened()  # it has grown
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            write(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        self._is_as_opened()

    def _is_as_opened(self) -> bool:
        """Whether the open file is still at its path and not smaller than before: SQLite detects neither."""
        before, now = self._file, _identity(self._path)
        if same := now[:2] == before[:2] and now[2] >= before[2]:
            self._file = now
        return same

    def _let_go(self) -> None:
        """Closes a file that was renamed, removed, replaced or truncated; its log is written back first."""
        assert self._connection is not None
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._drop_connection()
        for side in SIDE_FILES[1:]:  # SQLite leaves them behind, and would read them into a new database
            with contextlib.suppress(OSError):
                self._path.with_name(self._path.name + side).unlink()
        self._warn(f"{self._path} was renamed, removed or replaced under the run; a new one begins with what comes now")

    def _left_out(self, item: Item, why: str) -> None:
        """Counts a skipped transaction, unless it is owed, and warns at most every `TELL_S`."""
        now = time.monotonic()
        with self._lock:
            self._missing += not item.owed
            self._missing_responses += item.responses
            tell = self._told_at is None or now - self._told_at >= TELL_S
            if tell:
                self._told, self._told_at = self._missing, now
        if tell:
            self._warn(f"{self._path} cannot be written to ({why}); the run goes on, {self._lacks()} so far")

    def _note_missing(self) -> None:
        """Records how much was skipped, once something was written again."""
        if self._noted != self._missing:
            missing = self._missing
            self._transact(self.on_missing(self._lacks()))
            self._noted = missing

    def _lacks(self) -> str:
        return f"{self._missing} entries with {self._missing_responses} responses are missing"

    def _drop_connection(self) -> None:
        """Closes the file, so that a log that filled the disk can be removed; the next transaction opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


def _identity(path: Path) -> tuple[int, int, int]:
    """Returns device, inode and size, zeros without a file. Opening and closing it would release SQLite's locks."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_dev, found.st_ino, found.st_size


def _to_disk(connection: sqlite3.Connection) -> None:
    """Makes what was written durable, without waiting for readers."""
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


def opened(path: Path, warn: Callable[[str], None]) -> sqlite3.Connection:
    """Opens or creates the database for writing, and renames one of another version. Raises sqlite3.Error."""
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        for pragma in PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found not in (0, VERSION, *GROWS):
            connection.close()
            warn(f"{path} is of version {found}, not {VERSION}; it is now {set_aside(path, f'version_{found}')}")
            return opened(path, warn)
        connection.execute("BEGIN IMMEDIATE")
        for statement in statements():
            connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def set_aside(path: Path, why: str) -> Path:
    """Renames a database with its log, and returns its new name. Raises OSError."""
    new = path.with_name(f"{path.stem}.{why}{path.suffix}")
    for side in SIDE_FILES:
        old = path.with_name(path.name + side)
        new.with_name(new.name + side).unlink(missing_ok=True)
        if old.exists():
            old.rename(new.with_name(new.name + side))
    return new
