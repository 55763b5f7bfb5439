"""Whole runs in which engines and actors take turns (`time`), or engines wake on the actors' GPUs (`lend`): equal to
the bit to one without, whatever dies."""

import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from dapo.report.log import read_metrics
from dapo.report.store.schema import DATABASE
from dapo.sampling.lending import Lending
from dapo.workers.rollout import RolloutPool
from tests.end_to_end.faults.test_faults import Undisturbed, assert_undisturbed, break_once
from tests.support.outcomes import RUN, last_line
from tests.support.runs import Runs

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1500)]

TURNS = ("trainer.colocate=time", "trainer.device=cpu")
LEND = ("trainer.colocate=lend", "trainer.device=cpu")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets lending pay in every step, for the rule has tests of its own, and keeps work for the engines that wake."""
    whole = RolloutPool.room

    def room(pool: RolloutPool, n: int) -> int:
        return whole(pool, n) if pool.keeper.turn.is_set() else min(1, whole(pool, n))

    monkeypatch.setattr(RolloutPool, "room", room)
    monkeypatch.setattr(Lending, "gain_s", lambda self, waiting, response_s: 1.0)


def killing(method: str, number: int, *, after: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ends an engine's process before or after the second call of this method of the pool that concerns it; returns
    these calls."""
    calls: list[str] = []
    whole: Callable[..., Any] = getattr(RolloutPool, method)

    def kill(pool: Any) -> None:
        actor = ray.get(pool.workers[number].__ray_call__.remote(lambda worker: os.getpid()), timeout=60)
        [core] = [each for each in psutil.Process(actor).children(recursive=True) if "EngineCore" in each.name()]
        core.send_signal(signal.SIGKILL)

    async def call(pool: Any, *arguments: Any) -> Any:
        concerned = number == 0 or any(isinstance(one, tuple) and number in one for one in arguments)
        calls.extend([method] * concerned)
        if concerned and len(calls) == 2 and not after:
            kill(pool)
        answer = await whole(pool, *arguments)
        if concerned and len(calls) == 2 and after:
            kill(pool)
        return answer

    monkeypatch.setattr(RolloutPool, method, call)
    return calls


@pytest.mark.parametrize(
    ("method", "after"),
    [
        pytest.param("sleep", True, id="asleep"),
        pytest.param("start_update", True, id="between the wakes"),
    ],
)
def test_turns_change_no_bit_nor_does_an_engine_lost_in_them(
    runs: Runs, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, after: bool
) -> None:
    calls = killing(method, 0, after=after, monkeypatch=monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, *TURNS)
    assert len(calls) >= 2 and last_line(found)["perf/restarted_engines"] >= 1
    assert last_line(found)["perf/sleep_s"] > 0
    assert_undisturbed(found, undisturbed)


def test_a_rank_lost_while_the_engine_sleeps_costs_time_and_nothing_else(
    runs: Runs, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_once("actor.step:kill@6", tmp_path, monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, *TURNS)
    assert last_line(found)["perf/restarted_actors"] == 1
    assert_undisturbed(found, undisturbed)


def test_lending_changes_no_bit(runs: Runs, undisturbed: Undisturbed, tmp_path: Path, always: None) -> None:
    found = runs.small(tmp_path / "run", *RUN, *LEND)
    assert_undisturbed(found, undisturbed)
    lines = read_metrics(found / "metrics.jsonl")
    assert [line["perf/lending/wakes"] for line in lines] == [1.0] * len(lines)
    assert all(line["perf/lending/awake_s"] > 0 and line["perf/sleep_s"] > 0 for line in lines)
    with closing(sqlite3.connect(found / DATABASE)) as connection:
        served = connection.execute("SELECT DISTINCT engine FROM responses ORDER BY engine").fetchall()
    assert served == [(0,), (1,), (2,)], "one of its own, two on the ranks' devices"


def test_a_lent_engine_that_is_lost_costs_time_and_nothing_else(
    runs: Runs, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    calls = killing("finish_update", 1, after=True, monkeypatch=monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, *LEND)
    assert len(calls) >= 2
    assert_undisturbed(found, undisturbed)


def test_a_rank_lost_while_its_device_is_lent_ends_nothing(
    runs: Runs, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    """It dies while it sends the second step's weights to the engines on the ranks' devices."""
    break_once("actor.gather:kill@4", tmp_path, monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, *LEND)
    assert last_line(found)["perf/restarted_actors"] == 1
    assert_undisturbed(found, undisturbed)
