"""A long run in which something dies every few steps: of 60 steps, and by hand of 300."""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.faults.test_faults import assert_undisturbed, kills_an_engine
from tests.support.outcomes import RUN, outcome
from tests.support.runs import Runs

pytestmark = [pytest.mark.ray, pytest.mark.nightly]

EVERY = 10  # steps between two faults
LONG_RUN = (*RUN, "checkpoint.every=5", "actor.max_restarts=100", "checkpoint.keep=2")


class Saboteur:
    """Kills an engine or a rank about every `EVERY` steps, and looks at the driver's files, memory and processes."""

    def __init__(self, output_dir: Path, steps: int) -> None:
        self.killed: list[str] = []
        self.seen: list[tuple[int, int, int]] = []
        self._log = output_dir / "metrics.jsonl"
        self._last = steps - 5
        self._random = random.Random(5)
        self._next = 3
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}
        self._kill_engine = kills_an_engine(output_dir)

    def __call__(self, engines: Any) -> bool:
        step = self._step()
        if step >= self._last:
            return True
        if step < self._next or not all(slot.serving for slot in engines.keeper.slots):
            return False
        driver = psutil.Process()
        self.seen.append((driver.num_fds(), driver.memory_info().rss, len(driver.children(recursive=True))))
        self._next = step + self._random.randint(EVERY // 2, 3 * EVERY // 2)
        self.killed.append(self._random.choice(["engine", "rank"]))
        if self.killed[-1] == "engine":
            self._kill_engine(engines)
        else:
            self._random.choice([each for each in driver.children(recursive=True) if self._is_rank(each)]).kill()
        return False

    def _step(self) -> int:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def _is_rank(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):  # it has just ended
            line = "".join(process.cmdline())  # "ray::ActorWorker", with the call while it has one
            return process.pid not in self._before and line.startswith("ray::ActorWorker")
        return False


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(60, marks=pytest.mark.timeout(1500)),
        pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_a_run_with_many_faults_ends_as_one_without(runs: Runs, tmp_path: Path, steps: int) -> None:
    settings = (*LONG_RUN, f"trainer.total_steps={steps}")
    whole = outcome(runs.small(tmp_path / "whole", *settings))
    saboteur = Saboteur(tmp_path / "run", steps)
    found = runs.small(tmp_path / "run", *settings, beside=saboteur)
    print(f"killed {saboteur.killed}; files, bytes, processes of the driver: {saboteur.seen}")
    assert len(saboteur.killed) >= steps // 15
    assert_undisturbed(found, whole)
    files, memory, processes = zip(*saboteur.seen[1:], strict=True)
    assert max(processes) <= min(processes) + 2
    assert files[-1] <= 1.05 * files[0] and memory[-1] <= 1.05 * memory[0]
