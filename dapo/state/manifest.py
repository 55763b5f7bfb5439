"""Seals a directory with a list of its files, and verifies a sealed directory. `manifest.json` has size and SHA-256 of
every file. No library opens a file before this check."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from dapo.ground.durable import NOT_THERE, TRIES, sync_directory, tried, write_text

FORMAT = 3  # also of the caller's files; a directory of another format is not opened
MANIFEST = "manifest.json"
DIGESTS = "*.sha256.json"  # from a writer that hashed its own files
HASH_THREADS = 8  # hashing releases the GIL; a 32B checkpoint has hundreds of gigabytes

T = TypeVar("T")


class BrokenCheckpoint(RuntimeError):
    """A checkpoint is not as it was written; the message names the file."""


class Unreadable(RuntimeError):
    """A file could not be read and may be intact; the message names it and what to do."""


def seal(directory: Path) -> None:
    """Makes every file durable and writes the manifest, last of all.

    A file `*.sha256.json`, {name next to it: {"bytes": size, "sha256": hex}}, lists what its writer has hashed and
    synced itself: of these files only the sizes are compared. The lists are removed. Raises BrokenCheckpoint if a file
    is missing that a writer names.
    """
    known = _taken_digests(directory)
    files = _files(directory)
    own = [name for name in files if name not in known]
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        digests = threads.map(lambda name: _digest(directory / name, sync=True), own)
        hashed = {
            name: {"bytes": (directory / name).stat().st_size, "sha256": digest}
            for name, digest in zip(own, digests, strict=True)
        }
    for folder in [path for path in directory.rglob("*") if path.is_dir()]:
        sync_directory(folder)
    entries = known | hashed
    content = {"format": FORMAT, "files": {name: entries[name] for name in files}}
    write_text(directory / MANIFEST, json.dumps(content, indent=1) + "\n")


def leave_digests(paths: Sequence[Path], writer: str) -> None:
    """Hashes files as they are on disk, makes them durable, and writes the lists for `seal`, one per folder. writer:
    prefix of the lists, so that several writers can share a folder. Raises OSError."""
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        digests = list(threads.map(lambda path: _digest(path, sync=True), paths))
    of_folder: dict[Path, dict[str, Any]] = {}
    for path, digest in zip(paths, digests, strict=True):
        of_folder.setdefault(path.parent, {})[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    for folder, entries in of_folder.items():
        (folder / DIGESTS.replace("*", writer)).write_text(json.dumps(entries) + "\n", encoding="utf-8")


def verify(directory: Path) -> None:
    """Compares every file with the manifest. Raises BrokenCheckpoint for the first that differs or is missing, and
    Unreadable if I/O fails or another version of dapo wrote it."""
    manifest = directory / MANIFEST
    try:
        recorded = json.loads(readable(lambda: manifest.read_text(encoding="utf-8"), directory))
        version, files = recorded["format"], dict(recorded["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpoint(f"{manifest} is missing or cannot be read ({error})") from error
    if version != FORMAT:
        raise Unreadable(
            f"{manifest} is of another dapo: it has format {version}, and this one reads format {FORMAT}; go on with "
            "that version, or move the checkpoint away, and the run goes on without it"
        )
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        for fault in threads.map(lambda item: _fault(directory, *item), files.items()):
            if fault:
                raise BrokenCheckpoint(fault)


def _files(directory: Path) -> list[str]:
    names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    return sorted(name for name in names if name != MANIFEST)


def _taken_digests(directory: Path) -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.rglob(DIGESTS)):
        for name, entry in json.loads(path.read_text(encoding="utf-8")).items():
            written = path.with_name(name)
            if not written.is_file() or written.stat().st_size != entry["bytes"]:
                raise BrokenCheckpoint(
                    f"{written} is not there with the {entry['bytes']} bytes that its writer counted; do all ranks "
                    "share `trainer.output_dir`?"
                )
            known[str(written.relative_to(directory))] = {"bytes": entry["bytes"], "sha256": entry["sha256"]}
        path.unlink()
    return known


def _fault(directory: Path, name: str, recorded: dict[str, Any]) -> str:
    """Returns what is wrong with a file, or "". The cheap size check finds most faults. Raises Unreadable."""
    path = directory / name
    try:
        size = readable(lambda: path.stat().st_size, directory)
        if size != recorded["bytes"]:
            return f"{path} has {size} bytes where {recorded['bytes']} were written"
        if readable(lambda: _digest(path), directory) != recorded["sha256"]:
            return f"{path} has other content than was written (sha256 differs)"
    except NOT_THERE as error:
        return f"{path} cannot be read ({error})"
    except (KeyError, TypeError):
        return f"{path} has no size and sha256 in {MANIFEST}"
    return ""


def readable(read: Callable[[], T], path: Path) -> T:
    """Calls `read` with retries. Raises Unreadable with the name of `path`, or one of `NOT_THERE`."""
    try:
        return tried(read)
    except NOT_THERE:
        raise
    except OSError as error:
        raise Unreadable(
            f"{path} cannot be read ({error}; tried {TRIES} times) and may be whole all the same; see to the disk or "
            "the rights and give the same command again; or move it away, and the run goes on without it"
        ) from error


def _digest(path: Path, *, sync: bool = False) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
