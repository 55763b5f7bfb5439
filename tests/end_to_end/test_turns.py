"""Whole runs in which engines and actors take turns: equal to the bit to one in which they do not, whatever dies."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from dapo.faults.points import ONCE, VARIABLE
from tests.end_to_end.faults.test_faults import break_once
from tests.support.outcomes import RUN, assert_all_draws_are_accounted_for, last_line, outcome
from tests.support.runs import Runs, metrics
from workers.rollout import RolloutPool

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

TURNS = ("trainer.colocate=time", "trainer.device=cpu")
Undisturbed = tuple[str, list[dict[str, Any]]]


def kill_engine(pool: Any, number: int = 0) -> None:
    """Ends the engine's process."""
    actor = ray.get(pool.workers[number].__ray_call__.remote(lambda worker: os.getpid()), timeout=60)
    [core] = [each for each in psutil.Process(actor).children(recursive=True) if "EngineCore" in each.name()]
    core.send_signal(signal.SIGKILL)


def killing(method: str, *, after: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the engine die before or after the second call of this method of the pool in the run; returns the calls."""
    calls: list[str] = []
    whole: Callable[..., Any] = getattr(RolloutPool, method)

    async def call(pool: Any, *arguments: Any) -> Any:
        calls.append(method)
        if len(calls) == 2 and not after:
            kill_engine(pool)
        answer = await whole(pool, *arguments)
        if len(calls) == 2 and after:
            kill_engine(pool)
        return answer

    monkeypatch.setattr(RolloutPool, method, call)
    return calls


def test_turns_change_no_bit(runs: Runs, undisturbed: Undisturbed, tmp_path: Path) -> None:
    found = runs.small(tmp_path / "run", *RUN, *TURNS)
    assert outcome(found) == undisturbed
    assert last_line(found)["perf/sleep_s"] > 0
    assert_all_draws_are_accounted_for(found)


@pytest.mark.parametrize(
    ("method", "after"),
    [
        pytest.param("sleep", True, id="asleep", marks=pytest.mark.long),
        pytest.param("start_update", False, id="waking", marks=pytest.mark.long),
        pytest.param("start_update", True, id="between the wakes"),
        pytest.param("finish_update", True, id="awake", marks=pytest.mark.long),
    ],
)
def test_an_engine_lost_around_its_sleep_costs_time_and_nothing_else(
    runs: Runs, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, after: bool
) -> None:
    calls = killing(method, after=after, monkeypatch=monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, *TURNS)
    assert len(calls) >= 2 and last_line(found)["perf/restarted_engines"] >= 1
    assert outcome(found) == undisturbed
    assert_all_draws_are_accounted_for(found)


@pytest.mark.long
def test_a_rank_lost_while_the_engine_sleeps_costs_time_and_nothing_else(
    runs: Runs, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_once("actor.step:kill@6", tmp_path, monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, *TURNS)
    assert os.environ[VARIABLE] and list(Path(os.environ[ONCE]).iterdir()), "the point was not reached"
    assert outcome(found) == undisturbed
    assert last_line(found)["perf/restarted_actors"] == 1
    assert [line["step"] for line in metrics(found)] == [1, 2, 3]
    assert_all_draws_are_accounted_for(found)
