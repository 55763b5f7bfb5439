"""Judges as `dapo.fleet` starts them: one that is lost changes no reward, and none is left behind."""

import asyncio
import os
import signal
from dataclasses import replace

import psutil
import pytest

from dapo.config.compose import compose
from dapo.config.reward import OverlongBufferConfig, RemoteConfig, RewardFunctionConfig
from dapo.fleet import create_rewards
from tests.support.fakes import make_prompt, make_response
from tests.support.rewards.kept_judge import ENGINE, START_S, SUMS
from workers.placement import Placement

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.timeout(2400),
    pytest.mark.usefixtures("ray_cluster"),
]

COUNT = 24


def test_a_judge_is_lost_with_its_actor_and_another_takes_its_place() -> None:
    warnings: list[str] = []
    cfg = compose([], "dapo_tiny")
    cfg.reward.functions = [RewardFunctionConfig(path="judge", wrong=0.0)]
    cfg.reward.num_workers = cfg.reward.children_per_worker = 1
    cfg.reward.remote = RemoteConfig(timeout_s=20.0, call_timeout_s=20.0, retries=200, backoff_s=0.05)
    cfg.reward.judge, cfg.reward.overlong_buffer = replace(SUMS, engine=ENGINE), OverlongBufferConfig(enable=False)

    async def run() -> None:
        pool = create_rewards(cfg, Placement(cfg, "cpu"), "cpu")
        judges = pool._judges
        judges._warn = warnings.append
        try:
            await pool.start(START_S)
            before = await scored(pool)
            assert len(set(before)) > COUNT // 2
            handle = judges._places[0].handle
            actor = await handle.__ray_call__.remote(lambda self: os.getpid())
            server = await handle.__ray_call__.remote(lambda self: self._server.pid)
            there = [psutil.Process(server), *psutil.Process(server).children(recursive=True)]
            os.kill(actor, signal.SIGKILL)
            async with asyncio.timeout(START_S):
                while judges.restarts == 0 or judges._places[0].state is None:
                    await asyncio.sleep(0.2)
            assert not any(process.is_running() for process in there)
            assert await scored(pool) == before
            assert pool.lap()["perf/restarted_judges"] == 1
            assert any("judge 0 is replaced" in line for line in warnings)
            server = await judges._places[0].handle.__ray_call__.remote(lambda self: self._server.pid)
            there = [psutil.Process(server), *psutil.Process(server).children(recursive=True)]
        finally:
            pool.stop()
        async with asyncio.timeout(60):
            while any(process.is_running() for process in there):
                await asyncio.sleep(0.2)

    asyncio.run(run())


async def scored(pool) -> list[float]:
    prompt = replace(make_prompt(0), messages=(("user", "?"),))
    calls = [pool.score(prompt, n, make_response(text=f"{n + 11}+{3 * n + 20}=")) for n in range(COUNT)]
    return [score.reward for score in await asyncio.gather(*calls)]
