"""Writes checkpoints: one directory per step, complete or not there at all.

In: a step and whatever the caller and the actors write into the directory they are given. Out: the newest directory
whose every byte is as written. A step is written next to its place, hashed into `manifest.json`, renamed, and only then
named by `LATEST`; reading verifies the manifest before anything is opened, because DCP's metadata is a pickle.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dapo.state.durable import sync_directory, write_text

log = logging.getLogger(__name__)

FORMAT = 2  # also of the files that the caller writes: a checkpoint of another format is not opened
MANIFEST = "manifest.json"
LATEST = "LATEST"
STEP_NAME = re.compile(r"step_(\d{6,})")
TEMPORARY = ".tmp"
HASH_THREADS = 8  # hashing releases the GIL; a 32B checkpoint is some hundred gigabytes


class BrokenCheckpoint(Exception):
    """Says that a checkpoint is not as it was written; the message names the file."""


class CheckpointStore:
    """Owns the checkpoints of one run. Reading changes nothing; only the run that owns the directory may write."""

    def __init__(self, root: Path, *, keep: int) -> None:
        """Opens the store at root, usually OUTPUT_DIR/checkpoints, which need not exist. keep: newest checkpoints kept,
        0 = all."""
        self._root = root
        self._keep = keep
        self._whole: set[Path] = set()  # found whole by this process, which alone writes here: not hashed again

    @asynccontextmanager
    async def writing(self, step: int) -> AsyncIterator[Path]:
        """Yields a directory to write the checkpoint of `step` into: committed at the end, removed when the body
        raises.

        Hashing and moving files is left to a thread, so that generation can go on meanwhile. A checkpoint of the same
        step is replaced. Later ones go: they belong to a course that resuming has left.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        for left_over in self._root.glob(f"*{TEMPORARY}"):
            _remove(left_over)
        final = self._root / f"step_{step:06d}"
        temporary = final.with_name(final.name + TEMPORARY)
        temporary.mkdir()
        try:
            yield temporary
            await asyncio.to_thread(_seal, temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        await asyncio.to_thread(self._commit, step, temporary, final)

    def _commit(self, step: int, temporary: Path, final: Path) -> None:
        self._whole.discard(final)
        if final.exists():
            _discard(final)
        temporary.replace(final)
        sync_directory(self._root)
        write_text(self._root / LATEST, final.name + "\n")
        self._prune(step)

    def latest(self) -> Path | None:
        """Returns the checkpoint named by `LATEST` or else the newest one that is whole; None when there is none at
        all.

        Raises ValueError when there are checkpoints but none is whole: starting again would be a silent loss.
        """
        steps = self._steps()
        named = self._named()
        order = sorted(steps, key=lambda path: (path == named, step_of(path)), reverse=True)
        broken: list[str] = []
        for path in order:
            try:
                if path not in self._whole:
                    verify(path)
            except BrokenCheckpoint as error:
                log.warning("skipping a broken checkpoint: %s", error)
                broken.append(str(error))
                continue
            self._whole.add(path)
            return path
        if broken:
            raise ValueError(
                f"no checkpoint under {self._root} is whole ({'; '.join(broken)}); remove that directory to start the "
                "run again, or give another `trainer.output_dir`"
            )
        return None

    def completed(self, total_steps: int) -> Path | None:
        """Returns the newest whole checkpoint when it is of step `total_steps` or later; None while there is more to
        train."""
        newest = self.latest()
        return newest if newest is not None and step_of(newest) >= total_steps else None

    def _steps(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return [path for path in self._root.iterdir() if STEP_NAME.fullmatch(path.name) and path.is_dir()]

    def _named(self) -> Path | None:
        try:
            name = (self._root / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read (%s); taking the newest checkpoint", self._root / LATEST, error)
            return None
        path = self._root / name
        if path not in self._steps():
            log.warning("%s names %r, which is not there; taking the newest checkpoint", self._root / LATEST, name)
            return None
        return path

    def _prune(self, written: int) -> None:
        earlier = sorted((path for path in self._steps() if step_of(path) < written), key=step_of, reverse=True)
        superseded = [path for path in self._steps() if step_of(path) > written]
        too_old = earlier[self._keep - 1 :] if self._keep > 0 else []
        for path in superseded + too_old:
            _discard(path)


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint directory, from its name."""
    match = STEP_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is no checkpoint; its name must be step_ and at least six digits")
    return int(match.group(1))


def verify(directory: Path) -> None:
    """Compares every file with the manifest. Raises BrokenCheckpoint naming the first that differs."""
    manifest = directory / MANIFEST
    try:
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
        version, files = recorded["format"], dict(recorded["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpoint(f"{manifest} is missing or cannot be read ({error})") from error
    if version != FORMAT:
        raise BrokenCheckpoint(f"{manifest} has format {version}, and this dapo reads format {FORMAT}")
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        for fault in threads.map(lambda item: _fault(directory / item[0], item[1]), files.items()):
            if fault:
                raise BrokenCheckpoint(fault)


def _fault(path: Path, recorded: dict[str, Any]) -> str:
    """Returns what is wrong with a file, "" for nothing. The size comes first: it costs nothing and finds most
    faults.
    """
    try:
        size = path.stat().st_size
        if size != recorded["bytes"]:
            return f"{path} has {size} bytes where {recorded['bytes']} were written"
        if _digest(path) != recorded["sha256"]:
            return f"{path} has other content than was written (sha256 differs)"
    except OSError as error:
        return f"{path} cannot be read ({error})"
    except (KeyError, TypeError):
        return f"{path} has no size and sha256 in {MANIFEST}"
    return ""


def _seal(directory: Path) -> None:
    """Makes every file durable and writes the manifest, last of all."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        digests = list(threads.map(lambda path: _digest(path, sync=True), files))
    entries = {
        str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, digests, strict=True)
    }
    for folder in [path for path in directory.rglob("*") if path.is_dir()]:
        sync_directory(folder)
    write_text(directory / MANIFEST, json.dumps({"format": FORMAT, "files": entries}, indent=1) + "\n")


def _digest(path: Path, *, sync: bool = False) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _discard(path: Path) -> None:
    """Renames before removing, so that a crash midway leaves a left-over and not half a checkpoint."""
    condemned = path.with_name(f"{path.name}.old{TEMPORARY}")
    path.replace(condemned)
    _remove(condemned)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
