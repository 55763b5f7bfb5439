"""Measures what journal and checkpoints cost: steps of one run that differ in nothing else, in turns.

In: overrides of dapo_tiny in the short shape. Out: the median step of each kind, and of the saves how long they took
and by how much they delayed the next step, as a share of that.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dapo.bench.setting import run_config, trainer, workers
from dapo.config.schema import Config
from dapo.faults.limit import TimeLimit
from dapo.report.table import table
from dapo.trainer import Trainer

WARM_UP = 2  # rounds
# (journal, save, beside the next step); the last does not reach into a step that saves too
KINDS = {
    "no journal": (False, False, False),
    "journal": (True, False, False),
    "and a save, waited for": (True, True, False),
    "and a save beside it": (True, True, True),
}


class Turns(TimeLimit):
    """Gives each step the next kind when the one before has ended, and takes the times; limits none."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.saves: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._cfg = cfg
        self._count = 0
        self._kind = ""
        self._began = 0.0

    def attach(self, training: Trainer) -> None:
        """Takes the trainer whose steps these are."""
        self._training = training
        self._note = training.stream.buffer.on_scored

    def step_ended(self, line: str) -> None:
        """Notes the end of a step, before the trainer saves."""
        now = time.monotonic()
        if self._kind:
            self.steps[self._kind].append(now - self._began)
        names = list(KINDS)
        self._kind, self._began = names[self._count % len(names)], now
        self._count += 1
        journal, save, beside = KINDS[self._kind]
        self._training.stream.buffer.on_scored = self._note if journal else lambda group, started: None
        if journal:  # as if this policy had just been saved: else its groups are of no use, and left out
            self._training.saver.journal.begin(self._training.version)
        self._cfg.checkpoint.every, self._cfg.checkpoint.async_save = int(save), beside

    @contextmanager
    def measuring(self, act: str) -> Iterator[None]:
        """Notes how long saves take."""
        kind, began = self._kind, time.monotonic()
        yield
        if act == "save":
            self.saves[kind].append(time.monotonic() - began)


async def measure(cfg: Config, rounds: int) -> Turns:
    """Returns the times of so many rounds."""
    cfg.trainer.total_steps = (WARM_UP + rounds) * len(KINDS) + 1
    turns = Turns(cfg)
    async with workers(cfg) as (pools, prompts):
        directory = Path(cfg.trainer.output_dir) / "run"
        async with trainer(cfg, pools, prompts, directory, say=turns.step_ended, limit=turns) as training:
            turns.attach(training)
            await training.run()
    return turns


def report(turns: Turns) -> list[list[str]]:
    """Returns a row per kind."""
    steps = {kind: seconds[WARM_UP:] for kind, seconds in turns.steps.items()}
    rows = []
    for kind, before in zip(KINDS, ("", "no journal", "journal", "journal"), strict=True):
        row = [kind, f"{statistics.median(steps[kind]):.3f}"]
        if before:
            more = statistics.median(a - b for a, b in zip(steps[kind], steps[before], strict=True))
            row.append(f"{more:+.3f} ({more / statistics.median(steps[before]):+.1%})")
        saves = turns.saves[kind][WARM_UP : WARM_UP + len(steps[kind])]
        if saves:
            duration = statistics.median(saves)
            row += [f"{duration:.3f}", f"{more / duration:.1%}"]
        rows.append(row + ["–"] * (5 - len(row)))
    return rows


def run(given: argparse.Namespace) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = run_config("short", Path(folder), given.overrides)
        turns = asyncio.run(measure(cfg, given.rounds))
    print(f"medians of {given.rounds} steps of each kind, in turns; differences of neighbours")
    names: Sequence[str] = ("kind of step", "step s", "more than without s", "save s", "delay / save")
    print(table(names, report(turns)))
