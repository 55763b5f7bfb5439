"""Checks of the output directory (free space, write speed, whether all nodes see the same one), and of the files that
every node reads: models, on disk or from the hub, and functions. No files are left behind."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dapo.config.facts.hub import unreachable
from dapo.config.facts.model_files import offline_snapshot, weights_problems
from dapo.config.facts.model_shape import cached_config
from dapo.config.paths import not_on_hub, output_path
from dapo.state.checkpoint import LEFT
from dapo.tools.doctor.machines import Machines
from dapo.tools.doctor.subject import Finding, Question, Subject, fault, ok, sizes_of, warning
from dapo.tools.plan.step import CHECKPOINTS, STORE, on_disk
from dapo.tools.plan.terms import duration, size

BLOCK_BYTES = 4 << 20
BLOCKS = 16
ENOUGH_S = 5.0  # limit of writing time, on a slow disk
SEEN_S = 5.0  # time for another node to see a new file; NFS caches for 3 s or more
SHARED = "copy it to the same path on every node, or put it on a file system that all nodes share"
MISSING = "give a `trainer.output_dir` on a file system that all nodes share, and may write to"


def free_disk(subject: Subject) -> Finding:
    """Checkpoint sizes are exact; the rest follows from the planner's assumed response lengths."""
    directory = output_path(subject.cfg.trainer.output_dir)
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    terms = on_disk(subject.cfg, subject.checkpoint_bytes or 0.0)
    needed = {term.name: max(0.0, term.amount - _written(directory, term.name)) for term in terms}
    listed = ", ".join(f"{name} {size(amount)}" for name, amount in needed.items())
    found = f"{size(free)} free in {there}; the run will take up to {size(sum(needed.values()))} more: {listed}"
    if subject.checkpoint_bytes is None:
        found += " (the planner does not know this model, nor its checkpoints)"
    elif subject.checkpoint_bytes:
        found += f" ({terms[0].formula})"
    if left := sum(_sizes(directory.glob(f"{CHECKPOINTS}/{LEFT}*/**/*"))):
        found += f"; {CHECKPOINTS}/{LEFT}* hold {size(left)} that no run reads"
    keys = subject.cfg.checkpoint, subject.cfg.logging
    remedy = (
        f"make room, give another `trainer.output_dir`, or lower `checkpoint.keep` ({keys[0].keep}; 0: all), "
        f"`logging.max_store_bytes` ({size(keys[1].max_store_bytes)}; 0: no limit) or `checkpoint.batches` "
        f"({keys[0].batches})"
    )
    if free < needed[CHECKPOINTS]:
        return fault(found, remedy)
    return warning(found, remedy) if free < sum(needed.values()) else ok(found)


def _written(directory: Path, name: str) -> int:
    """Returns the bytes already written for a term of `on_disk`; abandoned checkpoints (`LEFT`) do not count."""
    below = {CHECKPOINTS: f"{CHECKPOINTS}/step_*/**/*", STORE: f"{STORE}*"}
    return sum(_sizes(directory.glob(below.get(name, f"{name}/**/*"))))


def _sizes(paths: Iterable[Path]) -> Iterator[int]:
    for path in paths:
        with suppress(OSError):  # a concurrent run removes files
            yield path.stat().st_size if path.is_file() else 0


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


def shared(subject: Subject, machines: Machines) -> Finding:
    directory = output_path(subject.cfg.trainer.output_dir)
    if len(machines.names) == 1:
        return ok("one machine")
    token = secrets.token_hex(16)
    try:
        with _scratch(directory) as folder:
            (folder / "token").write_text(token, encoding="utf-8")
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
    """Runs on a node: copies the token's file to `name` and returns its text, or the error."""
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
    """Reads a file that another node may just have made, waiting up to `SEEN_S` for it."""
    deadline = time.monotonic() + SEEN_S
    while not path.exists() and time.monotonic() < deadline:
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


def models(question: Question) -> Finding:
    """Checks that each model is readable here and equals the driver's, which `preflight` reads."""
    found = []
    for key, path in question.models.items():
        here = _directory(key, path, question.sizes[key]) if key in question.sizes else _hub(key, path)
        if here.level != "ok":
            return here
        found.append(here.found)
    return ok("; ".join(found))


def _directory(key: str, path: str, expected: dict[str, int]) -> Finding:
    folder = Path(path)
    try:
        here = sizes_of(folder)
        for name in here:
            with (folder / name).open("rb") as file:
                file.read(1)
    except OSError as error:
        return fault(f"`{key}` ({path}) cannot be read: {error}", SHARED)
    if others := sorted(name for name in expected | here if expected.get(name) != here.get(name)):
        return fault(f"`{key}` ({path}) differs from the driver's in {', '.join(others[:4])}", SHARED)
    weights = [here[name] for name in here if name.endswith(".safetensors")]
    return ok(f"`{key}`: {len(weights)} files of {size(sum(weights))}")


def _hub(key: str, name: str) -> Finding:
    from huggingface_hub import constants

    if (folder := offline_snapshot(name)) and (problems := weights_problems(folder)):
        return fault(f"`{key}` ({name}): {problems[0]}", f"`hf download {name}` on this node, or unset HF_HUB_OFFLINE")
    if cached_config(name):
        return ok(f"`{key}` ({name}) is in the hub's cache")
    error = unreachable(name, "model")
    if error or constants.HF_HUB_OFFLINE:
        return fault(*not_on_hub(key, name, error))
    return ok(f"`{key}` ({name}) can be fetched from the hub")


def functions(question: Question) -> Finding:
    """Checks that files of functions are readable here."""
    for key, path in question.files.items():
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            return fault(f"`{key}` ({path}) cannot be read: {error}", SHARED)
    return ok(f"{len(question.files)} files of functions can be read")
