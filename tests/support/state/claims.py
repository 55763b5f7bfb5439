"""Output directories that a test claims, and some steps in them (tests only)."""

import asyncio
from pathlib import Path
from typing import Any

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
    async def write() -> None:
        async with run.store.writing(step) as directory:
            (directory / "weights").write_text(f"of step {step}")

    asyncio.run(write())
