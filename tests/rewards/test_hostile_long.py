"""The whole hostile corpus, 1,500 responses and as many controls: with 1 and 4 children, beside busy processes, and
through Ray with 1 and 4 reward workers."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dapo.config.reward import OverlongBufferConfig, RewardConfig, RewardFunctionConfig
from dapo.types import Score
from tests.support.fakes import make_prompt, make_response
from tests.support.rewards.hostile.corpus import Item, corpus
from tests.support.rewards.hostile.scoring import broken_rules, run

HOSTILE = 1500
MAX_AT_CPU_LIMIT = 100

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@contextmanager
def busy_processes() -> Iterator[None]:
    """Two for each core."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


@pytest.mark.parametrize("function", ["math", "math_verify"])
def test_the_whole_corpus(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "t"
    trace.mkdir()
    monkeypatch.chdir(trace)
    items = corpus(1000, HOSTILE, trace)
    runs = {"1 child": run(function, items, 1), "4 children": run(function, items, 4)}
    with busy_processes():
        runs["under load"] = run(function, items, 4)
    for name, done in runs.items():
        cpu = sorted(verdict.cpu_s for verdict in done.verdicts if verdict.cpu_s == verdict.cpu_s)
        wall = max(verdict.wall_s for verdict in done.verdicts)
        over = max(peak - done.base for peak, _ in done.peaks.values())
        print(
            f"{function}, {name}: {done.count('cpu')} at the CPU limit, {done.count('memory')} at the memory limit, "
            f"{done.respawned} children replaced; most CPU {cpu[-1]:.3f} s, longest {wall:.2f} s; "
            f"address space at most {over / 2**20:.0f} MiB above the base"
        )
        assert broken_rules(items, done) == [], name
        assert done.count("cpu") <= MAX_AT_CPU_LIMIT
        assert done.rewards() == runs["1 child"].rewards()
    assert os.listdir(trace) == []


@pytest.mark.ray
@pytest.mark.parametrize("function", ["math", "math_verify"])
def test_the_whole_corpus_through_ray(function: str, tmp_path: Path, ray_cluster: None) -> None:
    trace = tmp_path / "t"
    trace.mkdir()
    items = corpus(1000, HOSTILE, trace)
    one, four = (asyncio.run(_through_ray(function, items, workers)) for workers in (1, 4))
    assert [(score.accuracy, score.reward) for score in one] == [(score.accuracy, score.reward) for score in four]
    assert all(score.accuracy == float(item.right) for item, score in zip(items, one, strict=True))
    assert {score.failure for score in (*one, *four)} <= {"", "cpu", "memory"}
    assert os.listdir(trace) == []


async def _through_ray(function: str, items: list[Item], workers: int) -> list[Score]:
    from workers.reward import RewardPool

    cfg = RewardConfig(
        functions=[RewardFunctionConfig(path=function)],
        num_workers=workers,
        overlong_buffer=OverlongBufferConfig(enable=False),
    )
    pool = RewardPool({"num_cpus": 0}, cfg, max_response_length=20480)
    try:
        await pool.start(120)
        began = time.monotonic()
        scores = await asyncio.gather(
            *[
                pool.score(
                    replace(make_prompt(0), ground_truth=item.ground_truth), n, make_response(text=item.solution_str)
                )
                for n, item in enumerate(items)
            ]
        )
        print(
            f"{function}, {workers} workers: {len(items)} responses in {time.monotonic() - began:.1f} s, "
            f"{dict(pool.failures)}, {pool.lap()}"
        )
        return list(scores)
    finally:
        pool.stop()
