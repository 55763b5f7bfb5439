"""Engines that join and leave a run: told (`dapo scale`) or killed, they change neither tokens nor weights."""

import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from dapo.algorithm.fate import TRAINED
from dapo.config.paths import resolve_path
from dapo.driver.scaling import POLL_S
from dapo.report.store.schema import DATABASE
from dapo.state.fleet_size import want_engines
from tests.support.outcomes import assert_all_draws_are_accounted_for, outcome
from tests.support.runs import START_S, command, metrics, run_program

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

STEPS = 40
WORK = ("data.train_batch_size=16", "actor.ppo_mini_batch_size=8", "rollout.n=16", "actor.max_tokens_per_gpu=1024")
RUN = (*WORK, f"trainer.total_steps={STEPS}", "eval.every=0", "checkpoint.every=20", "rollout.max_restarts=50")
LEAVE = ("rollout.leave_s=0.5",)  # so that the engines hand over what they run


class Program:
    def __init__(self, line: list[str], log: Path) -> None:
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT)

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self._log.read_text()))

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while self.runs and not holds():
            assert time.monotonic() < deadline, self._log.read_text()[-2000:]
            time.sleep(0.2)

    def engines(self) -> list[psutil.Process]:
        """The oldest first."""
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found += [(each.create_time(), each)] if "EngineCore" in each.name() else []
        return [each for _, each in sorted(found, key=lambda one: one[0])]


def scale_again_and_again(program: Program, run: Path) -> tuple[int, int]:
    """Up to four engines join; then one is killed, and all but one leave. Returns how many joined, and were killed."""
    joined, killed = r"has joined, and serves", 0
    program.until(lambda: program.count("step 1/") > 0)
    while program.runs and len(metrics(run)) < STEPS - 4:
        for most in (2, 4):
            came = program.count(joined)
            want_engines(run, most)
            program.until(lambda came=came, most=most: program.count(joined) >= came + most - 1)
            if program.runs:
                os.kill(program.engines()[-1].pid, signal.SIGKILL)
                killed += 1
            want_engines(run, 1)
            time.sleep(3 * POLL_S)  # until the run has seen it: a killed one would start again
            program.until(lambda: len(program.engines()) == 1)
    return program.count(joined), killed


def assert_each_draw_is_trained_once(run: Path) -> None:
    """What the steps counted is what the store holds, where a draw has one row."""
    with closing(sqlite3.connect(run / DATABASE)) as store:
        (counted,) = store.execute("SELECT sum(trained_tokens) FROM steps").fetchone()
        (held,) = store.execute("SELECT sum(tokens) FROM groups WHERE fate = ?", (TRAINED,)).fetchone()
    assert counted == held > 0


@pytest.mark.parametrize(
    "staleness", [(), ("filter_groups.max_staleness=1", "algorithm.rollout_correction.mode=truncate")], ids=["0", "1"]
)
def test_engines_that_come_and_go(tmp_path: Path, staleness: tuple[str, ...]) -> None:
    pq.write_table(
        pq.read_table(resolve_path("pkg://dapo.tiny/data/val.parquet")).slice(0, 8), tmp_path / "val.parquet"
    )
    scaled, val = tmp_path / "scaled", str(tmp_path / "val.parquet")
    program = Program(command(scaled, val, *RUN, *LEAVE, *staleness), tmp_path / "log")
    try:
        joined, killed = scale_again_and_again(program, scaled)
        assert program.process.wait(START_S) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        program.process.terminate()
    print(f"{joined} engines joined, {killed} of them were killed and the others told to leave, in {STEPS} steps")
    assert joined >= 8 and killed >= 4
    assert_all_draws_are_accounted_for(scaled)
    assert_each_draw_is_trained_once(scaled)
    if not staleness:
        run_program(tmp_path / "plain", val, *RUN)
        assert outcome(scaled) == outcome(tmp_path / "plain")
