"""A judge in real reward workers: faults of its server, of its process and of a worker change no reward."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from dapo.config.reward import JudgeConfig, OverlongBufferConfig, RemoteConfig, RewardConfig, RewardFunctionConfig
from tests.support.fakes import make_prompt, make_response
from tests.support.rewards.judge_server import judge_server
from workers.reward import RewardPool

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

PATIENCE_S = 120  # a hang guard
COUNT = 60


def test_faults_everywhere_change_no_reward() -> None:
    warnings: list[str] = []

    async def run(url: str) -> list[float]:
        cfg = RewardConfig(
            functions=[RewardFunctionConfig(path="judge", wrong=0.0)],
            num_workers=2,
            children_per_worker=1,
            concurrency=8,
            timeout_s=90.0,
            remote=RemoteConfig(timeout_s=60.0, call_timeout_s=1.0, retries=12, backoff_s=0.02),
            judge=JudgeConfig(url=url, model="judge", prompt="{prompt} {ground_truth}|{response}"),
            overlong_buffer=OverlongBufferConfig(enable=False),
        )
        pool = RewardPool({"num_cpus": 0}, cfg, max_response_length=20, warn=warnings.append)
        try:
            line = await pool.start(PATIENCE_S)
            assert "judge: 8 responses at a time in each worker" in line and "no known answers for judge" in line
            prompts = [
                replace(make_prompt(n), messages=(("user", f"p{n}"),), ground_truth=f"{n}") for n in range(COUNT)
            ]
            texts = [f"p{n} {n if n % 3 else n + 1}" for n in range(COUNT)]
            calls = [pool.score(p, 0, make_response(1, text=t)) for p, t in zip(prompts, texts, strict=True)]
            running = asyncio.gather(*calls)
            first, second = (worker.handle for worker in pool.fleet._workers)
            await asyncio.sleep(0.5)
            pid = await first.__ray_call__.remote(lambda self: self._children._callers.pids[-1])
            os.kill(pid, signal.SIGKILL)
            os.kill(await second.__ray_call__.remote(lambda self: os.getpid()), signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                return [score.reward for score in await running]
        finally:
            pool.stop()

    with judge_server("500", "silent", "429", "cut", "no score") as server:
        found = asyncio.run(run(server.url))
    assert found == [float(n % 3 > 0) for n in range(COUNT)], warnings
