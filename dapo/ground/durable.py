"""Crash-safe file writes (old or new content, never half), and reads that retry."""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

TRIES, WAIT_S = 4, 1.0  # of a read; each wait is twice as long as the one before
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # errors of a read that a retry does not change

T = TypeVar("T")


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically: a reader, or a crash at any moment, sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable: without it, a renamed file may have its old name after a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tried(read: Callable[[], T]) -> T:
    """Retries `read`: disks and network file systems fail now and then. Raises `NOT_THERE` errors at once."""
    for number in range(1, TRIES):
        try:
            return read()
        except NOT_THERE:
            raise
        except OSError:
            time.sleep(WAIT_S * 2 ** (number - 1))
    return read()


def remove(path: Path) -> None:
    """Removes a left-over; one that cannot be removed is only logged."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:  # removed by another process meanwhile
        return
    except OSError as error:
        log.warning("%s is a left-over and cannot be removed: %s", path, error)


def free_space(directory: Path) -> str:
    """Describes the free space for errors: torch does not name a full disk as the cause."""
    try:
        return f"{shutil.disk_usage(directory).free >> 20} MiB are free"
    except OSError as error:
        return f"how much is free is not known: {error}"


def make_folder(path: Path) -> list[Path]:
    """Makes a folder and those around it; returns the ones that were not there, the inner ones first."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return missing


def remove_empty(folders: Sequence[Path]) -> None:
    """Removes folders, the inner ones first, up to the first that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
