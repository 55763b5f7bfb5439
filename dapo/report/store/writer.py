"""Writes into the database from one thread, so that no caller waits for a disk.

    put ─▶ queue, bounded ─▶ thread: a transaction each ─▶ samples.sqlite (write-ahead log)

Each queued function is written completely or not at all, also after kill -9. What cannot be written is skipped,
reported and counted; file errors are not raised.
"""

import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dapo.report.store.schema import GROWS, VERSION, statements

Write = Callable[[sqlite3.Connection], object]

# Memory of queued items. A step of 512 x 16 responses of which half are dropped has 0.85 GiB at 5k tokens each, 1.7 GiB
# at 10k: a second one fits if the first is written, or small.
MAX_WAITING_BYTES = 1 << 30
BUSY_S = 60.0  # for which another program may lock the database
LOG_BYTES = 1 << 26  # of the write-ahead log on disk after a large transaction
CACHE_KIB = 16 << 10
PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",  # no wait for the disk at each transaction
    "secure_delete = OFF",  # some builds overwrite free pages, through the log
    f"journal_size_limit = {LOG_BYTES}",
    f"cache_size = -{CACHE_KIB}",
)
SIDE_FILES = ("", "-wal", "-shm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One transaction. size: bytes held in memory."""

    write: Write
    size: int = 0
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
        self._missing = 0  # transactions that were skipped
        self._told = False  # a warning says that nothing can be written
        self._thread: threading.Thread | None = None
        self._closed = False
        self._connection: sqlite3.Connection | None = None

    def put(self, write: Write, *, size: int = 0) -> Item:
        """Queues a transaction; see `Item`. Skipped if too much is queued, and after `close`."""
        item = Item(write=write, size=size)
        if self._closed:
            item.done.set()
            return item
        with self._lock:
            too_much = bool(self._size) and size > 0 and self._size + size > MAX_WAITING_BYTES
            self._size += 0 if too_much else size
        if too_much:
            item.done.set()
            self._left_out("the disk is too far behind")
            return item
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
            self._thread.start()
        self._queue.put(item)
        return item

    def flush(self, timeout_s: float) -> bool:
        """Waits until what was queued is on disk. Returns False after `timeout_s`."""
        return self._thread is None or self.put(_to_disk).done.wait(timeout_s)

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
        if self._missing:
            self._warn(f"{self._path} lacks {self._missing} entries that could not be written")
        self._drop_connection()

    def _take(self) -> bool:
        item = self._queue.get()
        if item is None:
            return False
        try:
            self._guard()
            self._write_or_begin_anew(item.write)
            self._told = self._told and item.write is _to_disk
        except Exception as error:  # of any kind: the run continues without it
            self._drop_connection()
            if item.write is not _to_disk:
                self._left_out(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._size -= item.size
            item.done.set()
        return True

    def _write_or_begin_anew(self, write: Write) -> None:
        try:
            self._transact(write)
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # subclasses mean a disk, a lock or a programming error
                raise
            self._drop_connection()
            self._warn(f"{self._path} is damaged ({error}); it is now {set_aside(self._path, 'damaged')}")
            self._transact(write)

    def _transact(self, write: Write) -> None:
        if self._connection is None:
            self._connection = opened(self._path, self._warn)
        if write is _to_disk:
            write(self._connection)
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            write(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    def _left_out(self, why: str) -> None:
        with self._lock:
            self._missing += 1
            told, self._told = self._told, True
        if not told:  # a warning is an entry, too
            self._warn(f"{self._path} cannot be written to ({why}); the run goes on, what comes meanwhile is left out")

    def _drop_connection(self) -> None:
        """Closes the file, so that a log that filled the disk can be removed; the next transaction opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


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
