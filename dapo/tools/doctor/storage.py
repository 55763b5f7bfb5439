"""Checks of the output directory (free space, write speed, whether all nodes see the same one), and of the files that
every node reads. No files are left behind."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dapo.config.paths import output_path
from dapo.tools.doctor.machines import ThisMachine
from dapo.tools.doctor.subject import Finding, Question, Subject, fault, ok, warning
from dapo.tools.plan.step import CHECKPOINTS, STORE, on_disk
from dapo.tools.plan.terms import duration, size

BLOCK_BYTES = 4 << 20
BLOCKS = 16
ENOUGH_S = 5.0  # limit of writing time, on a slow disk
SEEN_S = 5.0  # time for another node to see a new file; NFS caches for 3 s or more
SHARED = "copy it to the same path on every node, or put it on a file system that all nodes share"


def free_disk(subject: Subject) -> Finding:
    """Checkpoint sizes are exact; the rest follows from the planner's assumed response lengths."""
    directory = output_path(subject.cfg.trainer.output_dir)
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    terms = on_disk(subject.cfg, subject.checkpoint_bytes or 0.0)
    needed = {term.name: max(0.0, term.amount - _written(directory, term.name)) for term in terms}
    listed = ", ".join(f"{name} {size(amount)}" for name, amount in needed.items())
    found = f"{size(free)} free in {there}; the run will take up to {size(sum(needed.values()))} more: {listed}"
    remedy = (
        "make room, give another `trainer.output_dir`, or lower `checkpoint.keep`, `logging.max_store_bytes` (0: no "
        "limit) or `checkpoint.batches`"
    )
    if free < needed[CHECKPOINTS]:
        return fault(found, remedy)
    return warning(found, remedy) if free < sum(needed.values()) else ok(found)


def _written(directory: Path, name: str) -> int:
    """Returns the bytes already written for a term of `on_disk`."""
    below, total = {CHECKPOINTS: f"{CHECKPOINTS}/step_*/**/*", STORE: f"{STORE}*"}, 0
    for path in directory.glob(below.get(name, f"{name}/**/*")):
        with suppress(OSError):  # a concurrent run removes files
            total += path.stat().st_size if path.is_file() else 0
    return total


def write_speed(subject: Subject) -> Finding:
    """Writes up to 64 MiB and estimates the time of a checkpoint."""
    directory = output_path(subject.cfg.trainer.output_dir)
    block = os.urandom(BLOCK_BYTES)
    try:
        with _scratch(directory) as folder, (folder / "speed").open("wb") as file:
            began, written = time.perf_counter(), 0
            while written < BLOCKS * BLOCK_BYTES and time.perf_counter() - began < ENOUGH_S:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
                written += BLOCK_BYTES
            speed = written / (time.perf_counter() - began)
    except OSError as error:
        return fault(f"`trainer.output_dir` ({directory}) cannot be written to: {error}", "give another one")
    found = f"{size(speed)}/s to {directory}, synced"
    if not subject.checkpoint_bytes:  # unknown, or no checkpoint
        return ok(found)
    seconds, limit = subject.checkpoint_bytes / speed, subject.cfg.checkpoint.timeout_s
    # Ranks write in parallel: divided by the run's number of nodes, one node's time is an upper bound.
    nodes = max(1, subject.cfg.actor.num_workers // subject.cfg.plan.gpus_per_node)
    found += f": {duration(seconds / nodes)} for a checkpoint of {size(subject.checkpoint_bytes)}"
    found += f" written by {nodes} nodes" * (nodes > 1)
    if seconds / nodes > limit:
        return fault(f"{found}, above `checkpoint.timeout_s` ({limit:g} s)", "use a faster file system, or raise it")
    return ok(found)


def shared(subject: Subject, machines: ThisMachine) -> Finding:
    """Lets each node answer a token in the output directory."""
    directory = output_path(subject.cfg.trainer.output_dir)
    if len(machines.names) == 1:
        return ok("one machine")
    token = secrets.token_hex(16)
    with _scratch(directory) as folder:
        (folder / "token").write_text(token, encoding="utf-8")
        for number, name in enumerate(machines.names):
            machines.ask(name, _answer, str(folder), str(number))
        lacking = [name for number, name in enumerate(machines.names) if _read(folder / str(number)) != token]
    if lacking:
        return fault(
            f"not the same `trainer.output_dir` ({directory}) on {len(lacking)} of {len(machines.names)} nodes: "
            f"{', '.join(lacking[:3])}",
            "give a `trainer.output_dir` on a file system that all nodes share, and may write to",
        )
    return ok(f"the same on {len(machines.names)} nodes")


def _answer(folder: str, name: str) -> None:
    """Runs on a node: copies the token's file to `name`."""
    if text := _read(Path(folder) / "token"):
        (Path(folder) / name).write_text(text, encoding="utf-8")


def _read(path: Path) -> str:
    """Reads a file that another node may just have made, waiting up to `SEEN_S` for it; empty if it is not there."""
    deadline = time.monotonic() + SEEN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.1)
    return path.read_text(encoding="utf-8")


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Yields a new folder in the output directory. Removes it afterwards, with all parents that had to be created."""
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as folder:
            yield Path(folder)
    finally:
        for path in made:
            try:
                path.rmdir()
            except OSError:  # in use by a run meanwhile, or never created
                break


def files(question: Question) -> Finding:
    """Checks that local models and files of functions are readable here."""
    for key, path in question.files.items():
        if not os.access(path, os.R_OK):
            return fault(f"`{key}` ({path}) cannot be read", SHARED)
    return ok(f"{len(question.files)} models and files of functions can be read")
