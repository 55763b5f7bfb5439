"""Writes files that a crash leaves either old or new, never half written.

In: whole texts. Out: files. Used by `dapo.state.checkpoint`, `dapo.state.run_dir` and `dapo.report.log`.
"""

import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger(__name__)


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
