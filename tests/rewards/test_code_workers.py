"""The 200 solutions through Ray, with 1 and 4 reward workers beside busy processes: the same scores, all as known."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from dapo.config.reward import LimitsConfig, OverlongBufferConfig, RewardConfig, RewardFunctionConfig
from dapo.config.sandbox import SandboxConfig
from tests.support.fakes import make_prompt, make_response
from tests.support.sandbox.problems import solutions

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("workers", [1, 4])
def test_200_solutions_through_ray(workers, ray_cluster):
    cases = solutions(2)
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        scores = asyncio.run(score_all(cases, workers))
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    got = [(case.name, score.reward, score.failure) for case, score in zip(cases, scores, strict=True)]
    assert got == [(case.name, case.share, "") for case in cases]


async def score_all(cases, workers):
    from workers.reward import RewardPool

    limits = LimitsConfig(wall_s=120.0, sandbox=SandboxConfig(cpu_s=0.5, wall_s=1.0, total_s=10.0))
    cfg = RewardConfig(
        functions=[RewardFunctionConfig(path="code", kwargs={"partial": True})],
        num_workers=workers,
        children_per_worker=1,
        limits=limits,
        timeout_s=300.0,
        overlong_buffer=OverlongBufferConfig(enable=False),
    )
    pool = RewardPool({"num_cpus": 0}, cfg, max_response_length=20480)
    try:
        assert "programs of the model: " in await pool.start(300)
        return await asyncio.gather(
            *[
                pool.score(replace(make_prompt(0), ground_truth=case.ground_truth), n, make_response(text=case.text))
                for n, case in enumerate(cases)
            ]
        )
    finally:
        pool.stop()
