"""Writes files that a crash leaves either old or new, never half written; reads what is there at a later try alone."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

TRIES, WAIT_S = 4, 1.0  # of a read; the second wait is twice as long as the first, and so on
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # of all that a read may raise, these are facts

T = TypeVar("T")


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by `text` at once: a reader, and a crash at any moment, sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable: without it a renamed file may have its old name after a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tried(read: Callable[[], T]) -> T:
    """Returns what `read` does, also where only a later try works, for a disk or a network file system fails now and
    then. Raises what the last try did, and one of `NOT_THERE` at once."""
    for number in range(1, TRIES):
        try:
            return read()
        except NOT_THERE:
            raise
        except OSError:
            time.sleep(WAIT_S * 2 ** (number - 1))
    return read()


def remove(path: Path) -> None:
    """Removes a left-over. What cannot be removed is told, and is in nobody's way."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    if path.exists():
        log.warning("%s is a left-over and cannot be removed", path)


def free_space(directory: Path) -> str:
    """Returns in words how much more the disk takes, for errors: torch does not name a full one as the cause."""
    try:
        return f"{shutil.disk_usage(directory).free >> 20} MiB are free"
    except OSError as error:
        return f"how much is free is not known: {error}"
