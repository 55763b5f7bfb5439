"""The judge with vLLM's own server: it scores what its model says, and is not left behind by who started it."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from dapo.config.reward import LimitsConfig, RemoteConfig, RewardFunctionConfig
from dapo.rewards.calling.fork_server import Item
from dapo.rewards.calling.loading import with_judge
from dapo.workers.scoring.children import Children
from dapo.workers.scoring.verdict import Verdict
from tests.support.rewards.kept_judge import START_S, SUMS, kept_judge

pytestmark = [pytest.mark.ray, pytest.mark.timeout(2000)]

COUNT = 24
STARTER = """
import asyncio, sys
from dapo.workers.judging.server import Server
async def run():
    server = Server(["--model", "nowhere"], "127.0.0.1", silence_s=60)
    starting = asyncio.create_task(server.start(600))
    while not server.pid:
        await asyncio.sleep(0.01)
    print(server.pid, flush=True)
    await starting
asyncio.run(run())
"""


def scored(url: str, key: str) -> list[Verdict]:
    """Scores responses in the real processes, all at once."""
    servers = [{"url": url, "key": key}]
    texts = [f"{n + 11}+{3 * n + 20}=" for n in range(COUNT)]
    items = [Item(source="s", text=text, ground_truth="", extra_info={}, servers=servers) for text in texts]
    functions = with_judge([RewardFunctionConfig(path="judge", wrong=0.0)], SUMS)
    remote = RemoteConfig(timeout_s=900.0, call_timeout_s=30.0, retries=200, backoff_s=0.05)

    async def run() -> list[Verdict]:
        async with Children(functions, LimitsConfig(wall_s=60.0), 1, remote, concurrency=32) as children:
            async with asyncio.timeout(START_S):
                return list(await asyncio.gather(*[children.score(item) for item in items]))

    return asyncio.run(run())


@pytest.mark.nightly
def test_the_judge_gives_what_its_model_says_to_who_has_its_key() -> None:
    with kept_judge() as kept:
        found, again = (scored(kept.server.url, kept.server.key) for _ in range(2))
        refused = scored(kept.server.url, "another")
    assert [one.score.failure for one in found] == [""] * COUNT, found[0].detail
    rewards = [one.score.reward for one in found]
    assert rewards == [one.score.reward for one in again]
    assert len(set(rewards)) > COUNT // 2, "the judge reads what it is asked"
    metrics = found[0].score.metrics
    assert metrics["judge/prompt_tokens"] > 5 and metrics["judge/completion_tokens"] > 5
    assert metrics["judge/cost"] == pytest.approx(metrics["judge/prompt_tokens"] * 2e-6)
    assert {one.score.failure for one in refused} == {"error"} and "401" in refused[0].detail


def test_a_server_ends_with_the_process_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert psutil.pid_exists(pid)
        starter.kill()
    deadline = time.monotonic() + 120
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
