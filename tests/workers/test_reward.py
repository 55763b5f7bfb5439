"""Real reward workers in Ray: scores, faults of every process, what is told, and when the run is stopped."""

import asyncio
import math
import os
import signal
from dataclasses import replace

import pytest

from dapo.config.reward import LimitsConfig, OverlongBufferConfig, RewardConfig, RewardFunctionConfig
from dapo.workers.remote import RemoteError
from dapo.workers.reward import RewardPool
from tests.support.fakes import make_prompt, make_response
from tests.support.rewards.reward_programs import CANARIES, PROGRAM

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

PATIENCE_S = 60  # a hang guard


def use(path, body, *, warnings=None, lines=None, **changes):
    """Runs `body(pool)` with a pool of two workers of two children each."""

    async def whole():
        cfg = RewardConfig(
            functions=[RewardFunctionConfig(path=path)],
            num_workers=2,
            limits=LimitsConfig(wall_s=2.5),
            timeout_s=30.0,
            overlong_buffer=OverlongBufferConfig(enable=False),
        )
        warn = (lambda message: None) if warnings is None else warnings.append
        pool = RewardPool({"num_cpus": 0}, replace(cfg, **changes), max_response_length=20, warn=warn)
        try:
            line = await pool.start(PATIENCE_S)
            if lines is not None:
                lines.append(line)
            async with asyncio.timeout(PATIENCE_S):
                return await body(pool)
        finally:
            pool.stop()

    return asyncio.run(whole())


async def score_all(pool, texts):
    """The scores of responses that all end at once."""
    scores = [pool.score(make_prompt(7), i, make_response(1, text=text)) for i, text in enumerate(texts)]
    return await asyncio.gather(*scores)


async def pids(pool):
    """Returns the process numbers of the children, by worker."""
    calls = [worker.handle.__ray_call__.remote(lambda self: self._children.pids) for worker in pool.fleet.workers.all]
    return await asyncio.gather(*calls)


def test_infrastructure_fails_once_more_elsewhere_and_is_then_unscorable(program, tmp_path):
    warnings = []

    async def body(pool):
        texts = ["7", f"once {tmp_path / 'first'}", "hang", "segfault", "spin", "8"]
        return await score_all(pool, texts)

    limits = LimitsConfig(cpu_s=0.3, wall_s=3.0)  # so far apart that a busy machine gives 0.3 s of CPU within them
    right, once, hang, segfault, spin, wrong = use(program, body, warnings=warnings, limits=limits)
    assert (right.accuracy, once.accuracy, wrong.accuracy) == (1.0, 1.0, 0.0)
    assert (hang.failure, segfault.failure, spin.failure) == ("wall", "crash", "cpu")
    assert all(math.isnan(value) for score in (hang, segfault) for value in (score.accuracy, score.reward))
    assert (spin.accuracy, spin.reward) == (0.0, -1.0)
    assert len(warnings) == 3, "what a second try mended is not told"
    assert all("prompt 7 of data source 'test', response " in warning for warning in warnings)


TEXTS = ["7", "pause 0.2", "8", "none"] * 30


@pytest.mark.parametrize("victim", ["all children", "a frozen worker"])
def test_a_fault_changes_no_reward(program, victim):
    """While responses are being scored; SIGSTOP stands for a machine that is lost without a word."""

    async def body(pool):
        scoring = asyncio.ensure_future(score_all(pool, TEXTS))
        await asyncio.sleep(0.5)
        assert not scoring.done()
        workers = [await each.handle.__ray_call__.remote(lambda self: os.getpid()) for each in pool.fleet.workers.all]
        if victim == "a frozen worker":
            os.kill(workers[0], signal.SIGSTOP)
        else:
            children = [pid for some in await pids(pool) for pid in some]
            for pid in workers:  # else what one child lost may be tried again by another just before that one's turn
                os.kill(pid, signal.SIGSTOP)
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
        scores = await scoring
        await pool.check()  # finds what died with nothing to score
        while [len(some) for some in await pids(pool)] != [2, 2]:
            await asyncio.sleep(0.1)
        await pool.check()
        return scores, pool.lap()

    scores, restarts = use(program, body, timeout_s=4.0)
    expected = [(1.0, ""), (1.0, ""), (0.0, ""), (math.nan, "")] * 30
    assert [(score.accuracy, score.failure) for score in scores] == [
        pytest.approx(pair, nan_ok=True) for pair in expected
    ]
    kind, least = ("children", 4) if victim == "all children" else ("workers", 1)
    assert restarts[f"perf/restarted_reward_{kind}"] >= least


BREAKABLE = """
broken = []
ACTIONS["break"] = lambda rest: broken.append(1) or 1.0
ACTIONS["8"] = lambda rest: 1.0 if broken else -1.0
"""


def test_a_pool_says_what_guards_the_run_and_stops_where_it_scores_known_answers_wrong(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM + BREAKABLE + CANARIES)

    async def body(pool):
        await pool.check()
        assert (await score_all(pool, ["break"]))[0].accuracy == 1.0
        with pytest.raises(RemoteError, match="`compute_score` gave 1.0 for a known answer whose score is -1.0"):
            await pool.check()
        with pytest.raises(RemoteError, match="known answer"):
            await score_all(pool, ["7"])

    lines = []
    use(str(file), body, lines=lines)
    [line] = lines
    assert "2 x 2 processes" in line and "512 MiB" in line and "known answers" not in line
    assert ("no processes and no network" in line) or ("grants no limit of" in line)
