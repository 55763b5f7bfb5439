"""Actors that write beside the run, on a disk that a test holds up (tests only)."""

import asyncio
from pathlib import Path

from tests.support.driver.loops import tiny_config
from tests.support.fakes import FakeActors
from tests.support.faulty_pools import turns


class SlowDisk(FakeActors):
    """Makes a copy when `copying` is set, writes it when `gate` is, and then raises the next one of `errors`. log: what
    it does, in order."""

    def __init__(self, *errors: Exception | None, opened: bool = False) -> None:
        super().__init__()
        self.errors, self.gate, self.log = list(errors), asyncio.Event(), []
        self.copying = asyncio.Event()
        self.copying.set()
        if opened:
            self.gate.set()

    async def update(self, batch):
        self.log.append(f"update {batch.version}")
        return await super().update(batch)

    async def stage(self, version: int, *, export: bool) -> None:
        await turns(3)
        await self.copying.wait()
        await super().stage(version, export=export)
        self.log.append(f"staged {version}")

    async def write_staged(self, directory: str, export: str) -> None:
        self.log.append("writes")
        await self.gate.wait()
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            Path(directory).mkdir()
            raise error
        await super().write_staged(directory, export)
        self.log.append("written")


def saving_config(total_steps: int = 9, every: int = 1):
    cfg = tiny_config(total_steps=total_steps)
    cfg.checkpoint.async_save, cfg.checkpoint.every = True, every
    cfg.eval.every, cfg.eval.after_train = 0, False  # whether one is still owed depends on timing
    return cfg


async def taken(trainer, count: int) -> None:
    for _ in range(count):
        await trainer.step()


def left(path) -> list[str]:
    return sorted(each.name for each in (path / "checkpoints").glob("step_*"))
