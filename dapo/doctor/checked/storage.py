"""Looks at the output directory: room for the checkpoints, speed, and whether every node sees the same one.

In: a `Subject` and the machines of the run. Out: one `Finding` per function. Nothing stays behind.
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dapo.config.paths import output_path
from dapo.config.schema import Config
from dapo.doctor.finding import Finding, fault, ok
from dapo.doctor.machines import Machines
from dapo.doctor.subject import Subject
from dapo.plan.terms import duration, size

BLOCK_BYTES = 4 << 20
BLOCKS = 16
ENOUGH_S = 5.0  # of writing, on a slow disk
SEEN_S = 5.0  # in which another node must see a new file; NFS caches for 3 s or more
MISSING = "give a `trainer.output_dir` on a file system that all nodes share, and may write to"


def free_disk(subject: Subject) -> Finding:
    """Compares the free space with the checkpoints that the run keeps, one more while it writes."""
    directory = output_path(subject.cfg.trainer.output_dir)
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    one = subject.checkpoint_bytes
    if one is None:
        return ok(f"{size(free)} free; the planner does not know this model, nor its checkpoints")
    if not one:
        return ok(f"{size(free)} free; a run without actors writes no weights")
    kept = _kept(subject.cfg)
    written = sum(path.stat().st_size for path in directory.glob("checkpoints/**/*") if path.is_file())
    needed = max(0.0, one * (kept + 1) - written)
    found = f"{size(free)} free in {there}; {kept + 1} checkpoints of {size(one)} need {size(needed)}"
    if free < needed:
        return fault(
            found + " more" * bool(written),
            f"make room, give another `trainer.output_dir`, or lower `checkpoint.keep` ({subject.cfg.checkpoint.keep}; "
            "0: all)",
        )
    return ok(found)


def _kept(cfg: Config) -> int:
    """Counts the checkpoints that are there at the end: the last one, and those before it that are not deleted."""
    every = 1 if cfg.checkpoint.every_s else cfg.checkpoint.every
    saved = 1 + (cfg.trainer.total_steps // every if every else 0)
    return min(cfg.checkpoint.keep or saved, saved)


def write_speed(subject: Subject) -> Finding:
    """Writes up to 64 MiB there, and asks what that means for a checkpoint."""
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
    if not subject.checkpoint_bytes:  # not known, or none
        return ok(found)
    seconds, limit = subject.checkpoint_bytes / speed, subject.cfg.checkpoint.timeout_s
    # Ranks write side by side: with as many nodes as a run of that size has, one node's time is a bound from above.
    nodes = max(1, subject.cfg.actor.num_workers // subject.cfg.plan.gpus_per_node)
    found += f": {duration(seconds / nodes)} for a checkpoint of {size(subject.checkpoint_bytes)}"
    found += f" written by {nodes} nodes" * (nodes > 1)
    if seconds / nodes > limit:
        return fault(f"{found}, above `checkpoint.timeout_s` ({limit:g} s)", "use a faster file system, or raise it")
    return ok(found)


def shared(subject: Subject, machines: Machines) -> Finding:
    """Writes a token there, has every node read it and answer with a file of its own, and reads these."""
    directory = output_path(subject.cfg.trainer.output_dir)
    if len(machines.names) == 1:
        return ok("one machine")
    token = secrets.token_hex(16)
    try:
        with _scratch(directory) as folder:
            (folder / "token").write_text(token, encoding="utf-8")
            folder.chmod(0o777)  # nodes may run as other users; whoever may write to its parent could anyway
            answers = {
                name: machines.ask(name, _answer, str(folder), str(number))
                for number, name in enumerate(machines.names)
            }
            problems = [
                f"{name}: {problem}"
                for number, (name, seen) in enumerate(answers.items())
                if (problem := _problem(seen, token, folder / str(number)))
            ]
    except OSError as error:
        return fault(f"`trainer.output_dir` ({directory}) cannot be written to: {error}", "give another one")
    if problems:
        return fault(
            f"not the same `trainer.output_dir` ({directory}) on {len(problems)} of {len(answers)} nodes: "
            f"{'; '.join(problems[:3])}",
            MISSING,
        )
    return ok(f"the same on {len(answers)} nodes")


def _answer(folder: str, name: str) -> str:
    """Returns what a node reads in the token's file, and writes the same beside it; or why it cannot."""
    try:
        text = _read(Path(folder) / "token")
        (Path(folder) / name).write_text(text, encoding="utf-8")
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return text


def _problem(seen: object, token: str, answer: Path) -> str:
    if seen != token:
        return f"the driver's file is not there ({seen})"
    try:
        return "" if _read(answer) == token else "the driver reads another file than this node wrote"
    except OSError as error:
        return f"what this node writes is not there for the driver ({error})"


def _read(path: Path) -> str:
    """Returns the text of a file that another node may just have made."""
    deadline = time.monotonic() + SEEN_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return path.read_text(encoding="utf-8")


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Yields a new folder in the output directory, and removes it, and what else had to be made for it."""
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as folder:
            yield Path(folder)
    finally:
        for path in made:
            try:
                path.rmdir()
            except OSError:  # a run has begun there meanwhile, or it was never made
                break
