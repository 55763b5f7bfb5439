"""Whole runs whose engines wake on the actors' GPUs within a step: equal to the bit to one without, whatever dies."""

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dapo.faults.points import ONCE, VARIABLE
from dapo.sampling.lending import Lending
from dapo.store.schema import DATABASE
from tests.end_to_end.faults.test_faults import break_once
from tests.end_to_end.test_turns import kill_engine
from tests.support.outcomes import RUN, assert_all_draws_are_accounted_for, last_line, outcome
from tests.support.runs import Runs
from workers.rollout import RolloutPool

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

LEND = ("trainer.colocate=lend", "trainer.device=cpu")
Undisturbed = tuple[str, list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets it pay in every step, for the rule has tests of its own, and keeps work for the engines that wake."""
    whole = RolloutPool.room

    def room(pool: RolloutPool, n: int) -> int:
        return whole(pool, n) if pool.keeper.turn.is_set() else min(1, whole(pool, n))

    monkeypatch.setattr(RolloutPool, "room", room)
    monkeypatch.setattr(Lending, "gain_s", lambda self, waiting, response_s: 1.0)


def engines_of_responses(output_dir: Path) -> dict[int, int]:
    with closing(sqlite3.connect(output_dir / DATABASE)) as connection:
        return dict(connection.execute("SELECT engine, count(*) FROM responses GROUP BY engine"))


def assert_undisturbed(found: Path, undisturbed: Undisturbed) -> None:
    assert outcome(found) == undisturbed
    assert_all_draws_are_accounted_for(found)


def test_lending_changes_no_bit(runs: Runs, undisturbed: Undisturbed, tmp_path: Path) -> None:
    found = runs.small(tmp_path / "run", *RUN, *LEND)
    assert_undisturbed(found, undisturbed)
    lines = list(map(json.loads, (found / "metrics.jsonl").read_text().splitlines()))
    assert [line["perf/lending/wakes"] for line in lines] == [1.0] * len(lines)
    assert all(line["perf/lending/awake_s"] > 0 and line["perf/sleep_s"] > 0 for line in lines)
    served = engines_of_responses(found)
    assert served.keys() == {0, 1, 2} and min(served.values()) > 0, "one of its own, two on the ranks' devices"


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "after"),
    [
        pytest.param("sleep", True, id="asleep"),
        pytest.param("start_update", False, id="waking"),
        pytest.param("start_update", True, id="between the wakes"),
        pytest.param("finish_update", True, id="serving"),
    ],
)
def test_a_lent_engine_that_is_lost_costs_time_and_nothing_else(
    runs: Runs, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, after: bool
) -> None:
    """It dies in the second step that lends."""
    calls: list[str] = []
    whole: Callable[..., Any] = getattr(RolloutPool, method)

    async def call(pool: Any, *arguments: Any) -> Any:
        concerned = method == "sleep" or any(isinstance(one, tuple) and 1 in one for one in arguments)
        calls.extend([method] * concerned)
        if concerned and len(calls) == 2 and not after:
            kill_engine(pool, 1)
        answer = await whole(pool, *arguments)
        if concerned and len(calls) == 2 and after:
            kill_engine(pool, 1)
        return answer

    monkeypatch.setattr(RolloutPool, method, call)
    found = runs.small(tmp_path / "run", *RUN, *LEND)
    assert len(calls) >= 2
    assert_undisturbed(found, undisturbed)


@pytest.mark.long
def test_a_rank_lost_in_an_update_finds_its_device_free(
    runs: Runs, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_once("actor.step:kill@6", tmp_path, monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, *LEND)
    assert os.environ[VARIABLE] and list(Path(os.environ[ONCE]).iterdir()), "the point was not reached"
    assert last_line(found)["perf/restarted_actors"] == 1
    assert_undisturbed(found, undisturbed)


@pytest.mark.long
def test_a_rank_lost_while_its_device_is_lent_ends_nothing(
    runs: Runs, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies while it sends the second step's weights to the engines on the ranks' devices."""
    break_once("actor.gather:kill@4", tmp_path, monkeypatch)
    found = runs.small(tmp_path / "run", *RUN, *LEND)
    assert last_line(found)["perf/restarted_actors"] == 1
    assert_undisturbed(found, undisturbed)
