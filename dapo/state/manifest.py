"""Seals a directory with a list of its files, and compares a sealed directory with that list.

In: a directory. Out: `manifest.json` in it, with size and SHA-256 of every file and a checksum of its own; or the name
of the first of these files that is not as it was sealed. Nothing is opened by a library before this.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from dapo.state.durable import NOT_THERE, TRIES, sync_directory, tried, write_text

log = logging.getLogger(__name__)

FORMAT = 3  # also of the files that the caller writes: a directory of another format is not opened
MANIFEST = "manifest.json"
DIGESTS = "*.sha256.json"  # left by a writer that hashed what it wrote
SHARDS_OF = ".metadata"  # DCP's table of what lies where
SHARD = re.compile(rb"__\d+_\d+\.distcp")  # a name in that table, which is a pickle: here it is looked for as text
HASH_THREADS = 8  # hashing releases the GIL; a 32B checkpoint is some hundred gigabytes

T = TypeVar("T")


class BrokenCheckpoint(RuntimeError):
    """Says that a checkpoint is not as it was written; the message names the file."""


class UnreadableCheckpoint(RuntimeError):
    """Says that a checkpoint could not be read, and may be whole; the message names the file and what to do."""


def seal(directory: Path) -> None:
    """Makes every file durable and writes the manifest, last of all.

    A file `*.sha256.json`, {name next to it: {"bytes": size, "sha256": hex}}, says what its writer has hashed and
    synced itself: these files are not read back, only their sizes are compared. It is removed.
    Raises BrokenCheckpoint where a file is not there that a writer or DCP's metadata names.
    """
    known = _taken_digests(directory)
    files = _files(directory)
    for name in files:
        if Path(name).name == SHARDS_OF:
            _check_shards(directory / name)
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
    write_text(directory / MANIFEST, json.dumps(content | {"sha256": _checksum(content)}, indent=1) + "\n")


def leave_digests(paths: Sequence[Path], writer: str) -> None:
    """Hashes files as they lie on the disk, makes them durable, and leaves the lists of them that `seal` takes over.
    writer: names its lists, one per folder, so that several may write into the same. Raises OSError."""
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        digests = list(threads.map(lambda path: _digest(path, sync=True), paths))
    of_folder: dict[Path, dict[str, Any]] = {}
    for path, digest in zip(paths, digests, strict=True):
        of_folder.setdefault(path.parent, {})[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    for folder, entries in of_folder.items():
        (folder / DIGESTS.replace("*", writer)).write_text(json.dumps(entries) + "\n", encoding="utf-8")


def verify(directory: Path) -> None:
    """Compares every file of the manifest with what is there, and tells of further ones, which harm nothing. Raises
    BrokenCheckpoint naming the first that differs or is missing, and UnreadableCheckpoint where that cannot be told,
    for a disk or a file system of the network fails, or another version of dapo wrote it."""
    manifest = directory / MANIFEST
    try:
        recorded = json.loads(_read(lambda: manifest.read_text(encoding="utf-8"), directory))
        version, files = recorded["format"], dict(recorded["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpoint(f"{manifest} is missing or cannot be read ({error})") from error
    if recorded.get("sha256") != _checksum({"format": version, "files": files}):
        raise BrokenCheckpoint(f"{manifest} was changed after it was written (its own sha256 differs)")
    if version != FORMAT:
        raise UnreadableCheckpoint(
            f"{manifest} is of another dapo: it has format {version}, and this one reads format {FORMAT}; go on with "
            "that version, or move the checkpoint away, and the run goes on without it"
        )
    if more := [name for name in _read(lambda: _files(directory), directory) if name not in files]:
        some = ", ".join(more[:3]) + (", ..." if len(more) > 3 else "")
        log.warning("%s also holds what the run has not written: %s", directory, some)
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        for fault in threads.map(lambda item: _fault(directory, *item), files.items()):
            if fault:
                raise BrokenCheckpoint(fault)


def _files(directory: Path) -> list[str]:
    """Returns the names of all files below, relative and sorted, without the manifest itself."""
    names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    return sorted(name for name in names if name != MANIFEST)


def _checksum(content: dict[str, Any]) -> str:
    """Returns the SHA-256 of format and list of files, independent of spaces and order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _taken_digests(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns what writers hashed by name below `directory`, and removes their lists."""
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


def _check_shards(metadata: Path) -> None:
    """Raises BrokenCheckpoint where a shard that DCP's metadata names is not in the directory."""
    named = {name.decode() for name in SHARD.findall(metadata.read_bytes())}
    missing = sorted(name for name in named if not metadata.with_name(name).is_file())
    if missing:
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise BrokenCheckpoint(
            f"{metadata.parent} lacks {some}, which its {SHARDS_OF} names; all ranks must share `trainer.output_dir`"
        )


def _fault(directory: Path, name: str, recorded: dict[str, Any]) -> str:
    """Returns what is wrong with a file, "" for nothing. The size comes first: it costs nothing and finds most
    faults. Raises UnreadableCheckpoint."""
    path = directory / name
    try:
        size = _read(lambda: path.stat().st_size, directory)
        if size != recorded["bytes"]:
            return f"{path} has {size} bytes where {recorded['bytes']} were written"
        if _read(lambda: _digest(path), directory) != recorded["sha256"]:
            return f"{path} has other content than was written (sha256 differs)"
    except NOT_THERE as error:
        return f"{path} cannot be read ({error})"
    except (KeyError, TypeError):
        return f"{path} has no size and sha256 in {MANIFEST}"
    return ""


def _read(read: Callable[[], T], directory: Path) -> T:
    """Returns what `read` does, of a file in `directory`. Raises UnreadableCheckpoint, and one of `NOT_THERE`."""
    try:
        return tried(read)
    except NOT_THERE:
        raise
    except OSError as error:
        raise UnreadableCheckpoint(
            f"{directory} cannot be read ({error}; tried {TRIES} times) and may be whole all the same; see to the "
            "disk or the rights and give the same command again; or move that directory away, and the run goes on "
            "without it"
        ) from error


def _digest(path: Path, *, sync: bool = False) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
