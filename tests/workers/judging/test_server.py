"""The judge against vLLM's own server: faults between the two, a server that is killed, and one that loses its starter
change no reward and leave nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from dapo.config.reward import JudgeEngineConfig, LimitsConfig, RemoteConfig, RewardFunctionConfig
from dapo.rewards.calling.fork_server import Item
from dapo.rewards.calling.loading import with_judge
from tests.support.rewards.judge_server import judge_server
from tests.support.rewards.kept_judge import START_S, SUMS, KeptServer, kept_judge
from workers.judging.server import Server
from workers.scoring.children import Children
from workers.scoring.verdict import Verdict

pytestmark = [pytest.mark.ray, pytest.mark.timeout(2000)]

FAULTS = ("500", "429", "cut", "no json", "silent", "half", "no score", "score outside")
PATIENT = RemoteConfig(timeout_s=900.0, call_timeout_s=30.0, retries=200, backoff_s=0.05)
COUNT = 24


@pytest.fixture(scope="module")
def judge() -> Iterator[KeptServer]:
    with kept_judge() as kept:
        yield kept


@pytest.fixture(scope="module")
def plain(judge: KeptServer) -> list[float]:
    """The rewards without any fault."""
    found = scored(servers=[{"url": judge.server.url, "key": judge.server.key}])
    assert [one.score.failure for one in found] == [""] * COUNT, found[0].detail
    assert len({one.score.reward for one in found}) > COUNT // 2  # the judge reads what it is asked
    return rewards(found)


def scored(
    servers: list[dict[str, str]] | None = None, remote: RemoteConfig = PATIENT, during: Any = None, **judge: Any
) -> list[Verdict]:
    """Scores responses in the real processes, all at once. during: a function to call meanwhile."""
    items = [
        Item(source="s", text=f"{n + 11}+{3 * n + 20}=", ground_truth="", extra_info={}, servers=servers or ())
        for n in range(COUNT)
    ]
    keys = replace(SUMS, **judge)
    functions = with_judge([RewardFunctionConfig(path="judge", wrong=0.0)], keys)

    async def run() -> list[Verdict]:
        async with Children(functions, LimitsConfig(wall_s=60.0), 1, remote, concurrency=32) as children:
            running = asyncio.gather(*[children.score(item) for item in items])
            if during is not None:
                await asyncio.to_thread(during)
            async with asyncio.timeout(START_S):
                return list(await running)

    return asyncio.run(run())


def rewards(found: list[Verdict]) -> list[float]:
    return [one.score.reward for one in found]


def test_the_judge_gives_what_its_model_says(judge: KeptServer, plain: list[float]) -> None:
    again = scored(servers=[{"url": judge.server.url, "key": judge.server.key}])
    assert rewards(again) == plain
    metrics = again[0].score.metrics
    assert metrics["judge/prompt_tokens"] > 5 and metrics["judge/completion_tokens"] > 5
    assert metrics["judge/cost"] == pytest.approx(metrics["judge/prompt_tokens"] * 2e-6)


def test_faults_between_the_judge_and_vllm_change_no_reward(judge: KeptServer, plain: list[float]) -> None:
    with judge_server(*FAULTS, key=judge.server.key, upstream=judge.server.url) as between:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JUDGE_API_KEY", judge.server.key)
            found = scored(
                engine=JudgeEngineConfig(),
                url=between.url,
                model="judge",
                key_variable="JUDGE_API_KEY",
                remote=replace(PATIENT, call_timeout_s=10.0),
            )
    assert set(between.seen) == {*FAULTS, "answered"}
    assert rewards(found) == plain and {one.score.failure for one in found} == {""}


def test_another_key_is_refused(judge: KeptServer, plain: list[float]) -> None:
    found = scored(servers=[{"url": judge.server.url, "key": "another"}])
    assert {one.score.failure for one in found} == {"error"} and "401" in found[0].detail


@pytest.mark.long
def test_a_killed_server_is_started_again_and_no_reward_changes(judge: KeptServer, plain: list[float]) -> None:
    server = judge.server
    there = {"url": server.url, "key": server.key}
    before = psutil.Process(server.pid).children(recursive=True)
    assert before  # vLLM's engine is a process of its own

    found = scored(servers=[there], during=lambda: os.kill(server.pid, signal.SIGKILL))
    assert rewards(found) == plain and {one.score.failure for one in found} == {""}
    assert server.restarts == 1 and server.up and not server.failure and server.url == there["url"]
    assert not any(process.is_running() for process in before)


@pytest.mark.long
def test_a_server_without_its_engine_is_started_again(judge: KeptServer, plain: list[float]) -> None:
    server = judge.server
    restarts = server.restarts

    def kill_engine() -> None:
        for process in psutil.Process(server.pid).children(recursive=True):
            process.kill()

    found = scored(servers=[{"url": server.url, "key": server.key}], during=kill_engine)
    assert rewards(found) == plain and server.restarts == restarts + 1


STARTER = """
import asyncio, sys
from workers.judging.server import Server
async def run():
    server = Server(["--model", "nowhere"], "127.0.0.1", silence_s=60, max_restarts=0)
    starting = asyncio.create_task(server.start(600))
    while not server.pid:
        await asyncio.sleep(0.01)
    print(server.pid, flush=True)
    await starting
asyncio.run(run())
"""


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


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_is_an_error_with_the_reason(tmp_path: Any) -> None:
    async def run() -> None:
        await Server(["--model", str(tmp_path)], "127.0.0.1", silence_s=60, max_restarts=0).start(START_S)

    with pytest.raises(RuntimeError, match="its process ended .*Error"):
        asyncio.run(run())
