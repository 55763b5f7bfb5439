"""Real reward workers in Ray: scores, faults of every process, what is told, and when the run is stopped."""

import asyncio
import math
import os
import signal
from dataclasses import replace

import pytest

from dapo.config.reward import LimitsConfig, OverlongBufferConfig, RewardConfig, RewardFunctionConfig, RewardModelConfig
from tests.support.fakes import make_prompt, make_response
from tests.support.rewards.reward_programs import CANARIES, PROGRAM
from workers import reward as module
from workers.remote import RemoteError
from workers.reward import RewardPool

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

PATIENCE_S = 60  # a hang guard


def use(path, body, *, judge=None, warnings=None, **changes):
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
        pool = RewardPool({"num_cpus": 0}, replace(cfg, **changes), max_response_length=20, model=judge, warn=warn)
        try:
            await pool.start(PATIENCE_S)
            async with asyncio.timeout(PATIENCE_S):
                return await body(pool)
        finally:
            pool.stop()

    return asyncio.run(whole())


async def score_all(pool, texts, length=1):
    """The scores of responses that all end at once."""
    scores = [pool.score(make_prompt(7), i, make_response(length, text=text)) for i, text in enumerate(texts)]
    return await asyncio.gather(*scores)


async def pids(pool):
    """Returns the process numbers of the children, by worker."""
    calls = [worker.handle.__ray_call__.remote(lambda self: self._children.pids) for worker in pool.fleet._workers]
    return await asyncio.gather(*calls)


WEIGHTS = {"compute_score": 1.0, "length": 0.5}


def test_weights_metrics_and_overlong_penalty(program, tmp_path):
    plain = tmp_path / "plain.py"
    plain.write_text(PROGRAM)  # without known answers, which `length` would fail
    functions = [RewardFunctionConfig(path=str(plain), name=name, weight=w) for name, w in WEIGHTS.items()]
    overlong = OverlongBufferConfig(enable=True, len=8, penalty_factor=1.0)

    async def body(pool):
        texts = [("7", 12), ("7", 16), ("88", 20), ("keys", 12)]
        return [await pool.score(make_prompt(7), 0, make_response(tokens, text=text)) for text, tokens in texts]

    right, long, wrong, keys = use(program, body, functions=functions, overlong_buffer=overlong)
    assert (right.accuracy, right.reward) == (1.0, 1.0 + 0.5)
    assert (long.accuracy, long.reward, long.parts["overlong"]) == (1.0, 1.5 - 0.5, -0.5)
    assert (wrong.accuracy, wrong.reward, wrong.parts["length"]) == (0.0, -1.0 + 1.0 - 1.0, 2.0)
    assert keys.metrics == {"compute_score/steps": 3.0}


def test_what_waits_travels_in_few_calls(program):
    async def body(pool):
        send, calls = pool.fleet._send, []

        async def counted(worker, jobs):
            calls.append(len(jobs))
            await send(worker, jobs)

        pool.fleet._send = counted
        return await score_all(pool, ["7", "8"] * 150), calls

    scores, calls = use(program, body)
    assert [score.accuracy for score in scores] == [1.0, 0.0] * 150
    assert sum(calls) == 300 and len(calls) < 100


def test_infrastructure_fails_once_more_elsewhere_and_is_then_unscorable(program, tmp_path):
    warnings = []

    async def body(pool):
        texts = ["7", f"once {tmp_path / 'first'}", "hang", "segfault", "spin", "8"]
        return await score_all(pool, texts)

    limits = LimitsConfig(cpu_s=0.3, wall_s=1.0)
    right, once, hang, segfault, spin, wrong = use(program, body, warnings=warnings, limits=limits)
    assert (right.accuracy, once.accuracy, wrong.accuracy) == (1.0, 1.0, 0.0)
    assert (hang.failure, segfault.failure, spin.failure) == ("wall", "crash", "cpu")
    assert all(math.isnan(value) for score in (hang, segfault) for value in (score.accuracy, score.reward))
    assert (spin.accuracy, spin.reward) == (0.0, -1.0)
    assert len(warnings) == 3, "what a second try mended is not told"
    assert all("prompt 7 of data source 'test', response " in warning for warning in warnings)


TEXTS = ["7", "pause 0.2", "8", "none"] * 30


@pytest.mark.parametrize("victim", ["a child", "all children", "a worker", "a fork server", "a frozen worker"])
def test_a_fault_changes_no_reward(program, victim):
    """Kill -9 while responses are being scored; SIGSTOP stands for a machine that is lost without a word."""

    async def body(pool):
        scoring = asyncio.ensure_future(score_all(pool, TEXTS))
        await asyncio.sleep(0.5)
        assert not scoring.done()
        worker = pool.fleet._workers[0]
        workers = [await each.handle.__ray_call__.remote(lambda self: os.getpid()) for each in pool.fleet._workers]
        if victim in ("a worker", "a frozen worker"):
            os.kill(workers[0], signal.SIGKILL if victim == "a worker" else signal.SIGSTOP)
        elif victim == "a fork server":
            os.kill(worker.about["pid"], signal.SIGKILL)
        else:
            children = [pid for some in await pids(pool) for pid in some]
            for pid in workers:  # else what one child lost may be tried again by another just before that one's turn
                os.kill(pid, signal.SIGSTOP)
            for pid in children[:1] if victim == "a child" else children:
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
    least = {"a child": (0, 1), "all children": (0, 4), "a fork server": (0, 2)}.get(victim, (1, 0))
    assert restarts["perf/restarted_reward_workers"] >= least[0]
    assert restarts["perf/restarted_reward_children"] >= least[1]


def test_a_function_that_only_fails_stops_the_run(program, monkeypatch):
    monkeypatch.setattr(module, "MAX_FAILURES_IN_A_ROW", 20)

    async def body(pool):
        for _ in range(21):  # a verdict in between each time
            await score_all(pool, ["raise it"])
            await score_all(pool, ["7"])
        with pytest.raises(RemoteError, match=r"20 responses in a row; the last was prompt 7 .*KeyError.*of mine.py"):
            await score_all(pool, ["raise it"] * 20)

    use(program, body)


BREAKABLE = """
broken = []
ACTIONS["break"] = lambda rest: broken.append(1) or 1.0
ACTIONS["8"] = lambda rest: 1.0 if broken else -1.0
"""


def test_a_pool_that_scores_known_answers_wrong_stops_the_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM + BREAKABLE + CANARIES)

    async def body(pool):
        await pool.check()
        assert (await score_all(pool, ["break"]))[0].accuracy == 1.0
        with pytest.raises(RemoteError, match="`compute_score` gave 1.0 for a known answer whose score is -1.0"):
            await pool.check()
        with pytest.raises(RemoteError, match="known answer"):
            await score_all(pool, ["7"])

    use(str(file), body)


def test_a_function_that_cannot_be_loaded_is_named(program):
    async def body(pool):
        raise AssertionError("started")

    with pytest.raises(RemoteError, match=r"reward.functions\[0\].name"):
        use(program, body, functions=[RewardFunctionConfig(path=program, name="lenght")])


def test_the_start_up_line_says_what_guards_the_run(program):
    async def body(pool):
        return await pool.start(PATIENCE_S)

    line = use(program, body)
    assert "2 x 2 processes" in line and "512 MiB" in line
    assert ("no processes and no network" in line) or ("grants no limit of" in line)
    assert "known answers" not in line


class Judge:
    """A reward model's pool that gives what it is told to."""

    def __init__(self, value):
        self.value = value
        self.stopped = False

    async def start(self, timeout_s):
        """There is nothing to load."""

    async def score(self, prompt, response):
        return self.value

    def stop(self):
        self.stopped = True


@pytest.mark.parametrize(
    ("value", "accuracy", "reward", "failure"),
    [pytest.param(0.5, 1.0, 2.0, "", id="adds"), pytest.param(math.nan, math.nan, math.nan, "model", id="cannot-tell")],
)
def test_a_reward_model_adds_its_part(program, value, accuracy, reward, failure):
    judge = Judge(value)

    async def body(pool):
        return (await score_all(pool, ["7"]))[0]

    configured = {"num_workers": 1, "model": RewardModelConfig(weight=2.0)}
    score = use(program, body, judge=judge, **configured)
    assert [score.accuracy, score.reward] == pytest.approx([accuracy, reward], nan_ok=True)
    assert (score.failure, judge.stopped) == (failure, True)
