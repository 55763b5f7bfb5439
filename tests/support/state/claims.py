"""Output directories that a test claims, the checkpoints in them, and reads that fail (tests only)."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from dapo.ground import durable
from dapo.state.checkpoint import CheckpointStore
from dapo.state.run_dir import RunDirectory, claim_output_dir

CONFIG: dict[str, Any] = {
    "model": {"path": "pkg://dapo.tiny/base"},
    "data": {"train_files": ["a.parquet"], "max_prompt_length": 64, "shuffle": True},
    "rollout": {"n": 16, "num_engines": 1, "temperature": 1.0},
    "actor": {"num_workers": 2, "optim": {"lr": 1e-6}},
    "trainer": {"seed": 0, "total_steps": 10},
    "checkpoint": {"keep": 0, "accept_changes": [], "resume": "auto"},
}


def claim(path: Path, config: dict[str, Any] = CONFIG, resume: str = "auto") -> RunDirectory:
    """A start that nothing refuses."""
    run = claim_output_dir(str(path), resume, config)
    run.begin()
    return run


def save(run: RunDirectory, step: int) -> None:
    write(run.store, step, {"weights": f"of step {step}"})


async def writing(store: CheckpointStore, step: int, files: dict[str, str]) -> None:
    async with store.writing(step) as directory:
        for name, text in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(text)


def write(store: CheckpointStore, step: int, files: dict[str, str]) -> None:
    asyncio.run(writing(store, step, files))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def fails(patch: pytest.MonkeyPatch, owner: Any, read: str, times: int, *, of=lambda path: True, number=errno.EIO):
    """Lets so many of these reads fail, without waits between the tries."""
    whole, failures = getattr(owner, read), [number] * times

    def failing(path: Path, *arguments: Any, **options: Any) -> Any:
        if failures and of(path):
            raise OSError(failures.pop(), "of the disk", str(path))
        return whole(path, *arguments, **options)

    patch.setattr(durable, "WAIT_S", 0.0)
    patch.setattr(owner, read, failing)
