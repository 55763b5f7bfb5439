"""Whole runs with a judge of the run's own: what it says is in the rewards, and losing it changes no bit of the run."""

import json
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from dapo.report.store.schema import DATABASE
from tests.support.outcomes import RUN, last_line, outcome
from tests.support.runs import Runs

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(2400)]

# The judge works out what the response holds and ends on a digit, which is its score.
JUDGED = (
    "reward.functions=[{path: math}, {path: judge, weight: 0.05}]",
    "reward.judge.engine.path=pkg://dapo.tiny/base",
    "reward.judge.engine.vllm={max_model_len: 512, max_num_seqs: 32}",
    *("reward.judge.engine.silence_s=120", "reward.judge.prompt='{response}+12='"),  # else it may say nothing
    *(r"reward.judge.pattern='(\d)\D*$'", "reward.judge.highest=9", "reward.judge.max_tokens=64"),
    *("reward.judge.prompt_cost=2", "reward.num_workers=1"),
    *("reward.timeout_s=400", "reward.remote.timeout_s=180", "reward.remote.call_timeout_s=60"),
    *("reward.remote.retries=1000", "reward.remote.backoff_s=0.1"),
)


def servers() -> list[psutil.Process]:
    """The judges' servers on this machine and their watchers, without those that have ended and wait to be read."""
    found = [
        each
        for each in psutil.process_iter(["cmdline"])
        if "dapo.workers.judging.process" in (each.info["cmdline"] or ())
    ]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def all_end() -> bool:
    """Whether no server is left ten seconds after the end of a run."""
    until = time.monotonic() + 10
    while servers() and time.monotonic() < until:
        time.sleep(0.1)
    return servers() == []


def answers(run: Path) -> list[tuple[str, dict[str, float], dict[str, float]]]:
    """Text, reward by function, and other numbers of all answers that have a reward."""
    with closing(sqlite3.connect(run / DATABASE)) as db:
        rows = db.execute("SELECT text, parts, metrics FROM responses WHERE reward IS NOT NULL").fetchall()
    return [(text, json.loads(parts), json.loads(metrics)) for text, parts, metrics in rows]


def untimed(run: Path) -> tuple[str, list[dict[str, Any]]]:
    """Weights, samples and metrics; not the seconds of the judge's answers, nor how often it was asked again."""
    digest, lines = outcome(run)
    timed = ("judge/latency_s", "judge/retries")
    return digest, [
        {key: value for key, value in line.items() if not any(map(key.__contains__, timed))} for line in lines
    ]


def assert_judged(run: Path) -> None:
    found = answers(run)
    assert len(found) >= 3 * 4 * 4
    for _, parts, metrics in found:
        assert parts["judge"] in range(10)
        assert metrics["judge/prompt_tokens"] > 5 and metrics["judge/completion_tokens"] > 0
        assert metrics["judge/cost"] == pytest.approx(metrics["judge/prompt_tokens"] * 2e-6)
    assert len({parts["judge"] for _, parts, _ in found}) > 3, "the judge says the same of everything"


def test_what_the_judge_says_is_in_the_rewards_and_its_death_changes_no_bit(runs: Runs, tmp_path: Path) -> None:
    judged = runs.small(tmp_path / "judged", *RUN, *JUDGED)
    assert_judged(judged)
    assert all_end()

    def kill_once_it_has_judged(engines: Any) -> bool:
        if not (tmp_path / "run" / DATABASE).exists() or not answers(tmp_path / "run"):
            return False
        [server] = [process for process in servers() if os.getpgid(process.pid) == process.pid]  # not its watcher
        server.kill()
        return True

    run = runs.small(tmp_path / "run", *RUN, *JUDGED, beside=kill_once_it_has_judged)
    assert last_line(run)["perf/restarted_judges"] == 1
    assert untimed(run) == untimed(judged)
    assert all_end()
