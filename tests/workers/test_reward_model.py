"""The pool of reward model workers: few remote calls, and the same scores whatever worker dies, hangs or raises."""

import asyncio
import math
import os
import signal
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from dapo.config.reward import RewardModelConfig
from dapo.workers.remote import RemoteError
from dapo.workers.reward_model import RewardModelPool
from dapo.workers.scoring.classifier import ModelScore
from tests.support.fakes import make_prompt, make_response
from tests.support.rewards.tiny_reward_model import NAN, make_reward_model, one_by_one


class FakeWorker:
    """Scores the length of a response; `trouble(worker, texts)` may raise, hang or give another score before."""

    def __init__(self, index, log, trouble, canary):
        async def start(*arguments):
            return canary(index)

        async def score(texts):
            log.append((index, texts))
            await asyncio.sleep(0)
            other = await trouble(index, texts)
            return [(number, other or ModelScore(value=float(len(text)))) for number, text in enumerate(texts)]

        async def stream(conversations):
            yield score([conversation.response for conversation in conversations])

        self.start = SimpleNamespace(remote=start)
        self.score = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=stream))


async def no_trouble(index, texts):
    return None


def run_with_fakes(monkeypatch, use, *, workers=2, trouble=no_trouble, canary=None, warnings=None, **settings):
    """The pool over `FakeWorker`s; what `use(pool)` gives, and the calls: (worker, texts) each."""
    calls = []
    canary = canary or (lambda index: ModelScore(value=1.0))
    warn = (lambda message: None) if warnings is None else warnings.append
    monkeypatch.setattr(RewardModelPool, "_create", lambda self, index: FakeWorker(index, calls, trouble, canary))
    monkeypatch.setattr("dapo.workers.supervise.ray.kill", lambda worker: None)

    async def body():
        pool = RewardModelPool(RewardModelConfig(path="m", **settings), [{}] * workers, device="cpu", warn=warn)
        try:
            await pool.start(5)
            return await asyncio.wait_for(use(pool), 20)
        finally:
            pool.stop()

    return asyncio.run(body()), calls


async def score_all(pool, texts, length=4):
    return await asyncio.gather(*[pool.score(make_prompt(7), make_response(length, text=text)) for text in texts])


def test_a_call_is_bounded_in_tokens(monkeypatch):
    async def use(pool):
        return await score_all(pool, ["x"] * 9)

    _, calls = run_with_fakes(monkeypatch, use, workers=1, max_tokens=7)  # 28 tokens a call, 7 a response
    assert [len(texts) for _, texts in calls] == [4, 4, 1]


async def raises_on_bad(index, texts):
    if "bad" in texts:
        raise RayTaskError("score", "the remote traceback", RuntimeError("no"))


async def hangs_on_bad(index, texts):
    if "bad" in texts:
        await asyncio.sleep(600)


@pytest.mark.parametrize("trouble", [raises_on_bad, hangs_on_bad], ids=["raises", "silent"])
def test_a_response_that_workers_fail_on_is_unscorable_alone(trouble, monkeypatch):
    async def use(pool):
        return await score_all(pool, ["a", "bb", "bad", "dddd"]), pool.fleet.workers.restarts, dict(pool.failures)

    warnings = []
    (scores, respawned, failures), calls = run_with_fakes(
        monkeypatch, use, workers=1, trouble=trouble, warnings=warnings, timeout_s=0.2
    )
    assert scores[:2] + scores[3:] == [1.0, 2.0, 4.0] and math.isnan(scores[2])
    assert (respawned, failures) == (3, {"worker": 1})  # with others, alone, alone
    assert [texts for _, texts in calls] == [["a", "bb", "bad", "dddd"], ["a"], ["bb"], ["bad"], ["dddd"], ["bad"]]
    assert sum("reward model worker 0 is replaced: its worker was lost" in warning for warning in warnings) == 3
    assert sum("to prompt 7 has no score: worker its worker was lost" in warning for warning in warnings) == 1


def gives(failure, texts):
    """A worker's trouble: these texts have no score."""

    async def trouble(index, scored):
        return ModelScore(value=math.nan, failure=failure, detail="no tools") if scored[0] in texts else None

    return trouble


@pytest.mark.parametrize("failure", ["too_long", "prompt"])
def test_a_response_without_score_is_unscorable_and_told_of_and_counted(failure, monkeypatch):
    """The chat template of the reward model may refuse one prompt of a data set, which ends no run of days."""

    async def use(pool):
        scores = [(await score_all(pool, [text]))[0] for text in ("a", "bad", "b", *["bad"] * 4)]
        return scores, dict(pool.failures)

    warnings = []
    (scores, failures), _ = run_with_fakes(
        monkeypatch, use, trouble=gives(failure, ["bad"]), warnings=warnings, workers=1
    )
    assert [math.isnan(score) for score in scores] == [False, True, False, *[True] * 4]
    assert failures == {failure: 5}
    told = [warning for warning in warnings if "prompt 7 has no score" in warning and "no tools" in warning]
    assert [warning.rpartition("number ")[2] for warning in told] == ["1)", "2)", "3)", "4)"]


def test_a_model_that_can_read_no_prompt_ends_the_run(monkeypatch):
    """Nothing would ever be trained on; that long responses, which end together, have no score says less."""
    monkeypatch.setattr("dapo.workers.reward_model.MAX_FAILURES_IN_A_ROW", 6)

    async def use(pool):
        for _ in range(3):
            await score_all(pool, ["a", *["bad"] * 5])
        await score_all(pool, ["bad"] * 6)

    with pytest.raises(RemoteError, match=r"`reward.model.path` \(m\) scores none of 6 responses in a row.*no tools"):
        run_with_fakes(monkeypatch, use, workers=1, max_tokens=1, trouble=gives("prompt", ["bad"]))
    assert run_with_fakes(monkeypatch, use, workers=1, max_tokens=1, trouble=gives("too_long", ["bad"]))[0] is None


CANARIES = [
    (lambda index: ModelScore(value=math.nan, failure="not_finite"), "no score for a plain"),
    (lambda index: ModelScore(value=1.0 + index), "must be the same for all"),
]


@pytest.mark.parametrize(("canary", "message"), CANARIES, ids=["no-number", "other-weights"])
def test_a_canary_that_fails_stops_the_start(canary, message, monkeypatch):
    async def use(pool):
        raise AssertionError("started")

    with pytest.raises(RemoteError, match=f"`reward.model.path` \\(m\\).*{message}|{message}"):
        run_with_fakes(monkeypatch, use, canary=canary)


LENGTH = 61  # tokens of a response, so that a call of 4 * 256 has 16 of the 250
LOAD = [f"{'7' * (number % 40)}{number}" for number in range(240)] + [f"{NAN}{number}" for number in range(10)]


@pytest.mark.ray
def test_scores_are_those_of_transformers_though_a_worker_is_killed(ray_cluster, tmp_path):
    path = make_reward_model(tmp_path, nan=NAN)
    config = RewardModelConfig(path=path, num_workers=2, max_tokens=256, timeout_s=4.0)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}

    async def body():
        pool = RewardModelPool(config, [options] * 2, device="cpu")
        try:
            await pool.start(120)
            pid = await pool.fleet.workers.all[0].handle.__ray_call__.remote(lambda self: os.getpid())
            tasks = [asyncio.create_task(score_all(pool, [text], LENGTH)) for text in LOAD]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            os.kill(pid, signal.SIGKILL)
            return [score for task in tasks for score in await task], pool.fleet.workers.restarts, dict(pool.failures)
        finally:
            pool.stop()

    scores, respawned, failures = asyncio.run(body())
    assert scores == pytest.approx(one_by_one(path, LOAD, messages=(("user", "7"),)), abs=1e-5, nan_ok=True)
    assert [math.isnan(score) for score in scores] == [False] * 240 + [True] * 10
    assert respawned >= 1 and failures == {"not_finite": 10}
