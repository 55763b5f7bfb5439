"""The pool of reward model workers: few remote calls, and the same scores whatever worker dies, hangs or raises."""

import asyncio
import math
import os
import signal

import pytest
from ray.exceptions import RayTaskError

from dapo.config.reward import RewardModelConfig
from tests.support.fakes import make_prompt, make_response
from tests.support.rewards.tiny_reward_model import NAN, make_reward_model, one_by_one
from workers.remote import RemoteError
from workers.reward_model import RewardModelPool
from workers.scoring.classifier import ModelScore


class Remote:
    """A method of an actor that is called in this process; a streaming one gives references."""

    def __init__(self, call):
        self.remote = call

    def options(self, **options):
        return self


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

        self.start, self.score = Remote(start), Remote(stream)


async def no_trouble(index, texts):
    return None


def run_with_fakes(monkeypatch, use, *, workers=2, trouble=no_trouble, canary=None, warnings=None, **settings):
    """The pool over `FakeWorker`s; what `use(pool)` gives, and the calls: (worker, texts) each."""
    calls = []
    canary = canary or (lambda index: ModelScore(value=1.0))
    warn = (lambda message: None) if warnings is None else warnings.append
    monkeypatch.setattr(RewardModelPool, "_create", lambda self, index: FakeWorker(index, calls, trouble, canary))
    monkeypatch.setattr("workers.scoring.fleet.ray.kill", lambda worker: None)

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


def test_what_waits_is_dealt_out_to_the_free_workers(monkeypatch):
    async def use(pool):
        return await score_all(pool, ["x" * length for length in range(10)])

    scores, calls = run_with_fakes(monkeypatch, use)
    assert scores == list(range(10))
    assert sorted((index, len(texts)) for index, texts in calls) == [(0, 5), (1, 5)]


def test_a_call_is_bounded_in_tokens(monkeypatch):
    async def use(pool):
        return await score_all(pool, ["x"] * 9)

    _, calls = run_with_fakes(monkeypatch, use, workers=1, max_tokens=7)  # 28 tokens a call, 7 a response
    assert [len(texts) for _, texts in calls] == [4, 4, 1]


def test_responses_that_nobody_waits_for_are_not_scored(monkeypatch):
    async def use(pool):
        tasks = [asyncio.create_task(score_all(pool, [text])) for text in ("a", "bb", "ccc")]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await score_all(pool, ["dddd"])

    scores, calls = run_with_fakes(monkeypatch, use, workers=1)
    assert scores == [4.0] and calls[-1] == (0, ["dddd"])


def raises_on(bad):
    async def trouble(index, texts):
        if bad in texts:
            raise RayTaskError("score", "the remote traceback", RuntimeError("no"))

    return trouble


async def hangs_on_bad(index, texts):
    if "bad" in texts:
        await asyncio.sleep(600)


@pytest.mark.parametrize(
    "trouble", [pytest.param(raises_on("bad"), id="raises"), pytest.param(hangs_on_bad, id="silent")]
)
def test_a_response_that_workers_fail_on_is_unscorable_alone(trouble, monkeypatch):
    async def use(pool):
        return await score_all(pool, ["a", "bb", "bad", "dddd"]), pool.fleet.respawned, dict(pool.failures)

    warnings = []
    (scores, respawned, failures), calls = run_with_fakes(
        monkeypatch, use, workers=1, trouble=trouble, warnings=warnings, timeout_s=0.5
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
    monkeypatch.setattr("workers.reward_model.MAX_FAILURES_IN_A_ROW", 6)

    async def use(pool):
        for _ in range(3):
            await score_all(pool, ["a", *["bad"] * 5])
        await score_all(pool, ["bad"] * 6)

    with pytest.raises(RemoteError, match=r"`reward.model.path` \(m\) scores none of 6 responses in a row.*no tools"):
        run_with_fakes(monkeypatch, use, workers=1, max_tokens=1, trouble=gives("prompt", ["bad"]))
    assert run_with_fakes(monkeypatch, use, workers=1, max_tokens=1, trouble=gives("too_long", ["bad"]))[0] is None


def test_a_pool_that_fails_again_and_again_ends_the_run(monkeypatch):
    async def use(pool):
        await asyncio.gather(*[score_all(pool, ["bad"]) for _ in range(9)])

    with pytest.raises(RemoteError, match="were lost 10 times in a row.* no"):
        run_with_fakes(monkeypatch, use, trouble=raises_on("bad"))


def test_who_waits_is_told_when_a_worker_cannot_be_replaced(monkeypatch):
    async def use(pool):
        waiting = asyncio.gather(*[score_all(pool, [text]) for text in ("bad", "a", "b")], return_exceptions=True)
        return await waiting, await asyncio.gather(score_all(pool, ["a"]), return_exceptions=True)

    starts = iter([ModelScore(value=1.0), ModelScore(value=9.0)])
    (waiting, later), _ = run_with_fakes(
        monkeypatch, use, workers=1, trouble=raises_on("bad"), canary=lambda index: next(starts)
    )
    for error in (*waiting, *later):
        assert isinstance(error, RemoteError) and "9 and another worker 1" in str(error)


@pytest.mark.parametrize(
    ("canary", "message"),
    [
        pytest.param(
            lambda i: ModelScore(value=math.nan, failure="not_finite"), "no score for a plain", id="no-number"
        ),
        pytest.param(lambda i: ModelScore(value=1.0 + i), "must be the same for all", id="other-weights"),
    ],
)
def test_a_canary_that_fails_stops_the_start(canary, message, monkeypatch):
    async def use(pool):
        raise AssertionError("started")

    with pytest.raises(RemoteError, match=f"`reward.model.path` \\(m\\).*{message}|{message}"):
        run_with_fakes(monkeypatch, use, canary=canary)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_reward_model(tmp_path_factory.mktemp("reward-model"), nan=NAN)


@pytest.fixture(scope="module")
def pool(ray_cluster, path):
    """Two real workers, and the event loop that they are served on."""
    config = RewardModelConfig(path=path, num_workers=2, max_tokens=256, timeout_s=4.0)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    with asyncio.Runner() as runner:

        async def create():
            made = RewardModelPool(config, [options] * 2, device="cpu")
            await made.start(120)
            return made

        made = runner.run(create())
        yield runner, made
        made.stop()


def signalled(number, worker):
    """The worker's process gets a signal while there is something to do."""

    async def use(pool):
        pid = await pool.fleet._workers[worker].handle.__ray_call__.remote(lambda self: os.getpid())
        tasks = [asyncio.create_task(score_all(pool, [text], LENGTH)) for text in LOAD]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        os.kill(pid, number)
        return [score for task in tasks for score in await task]

    return use


async def undisturbed(pool):
    return await score_all(pool, LOAD, LENGTH)


LENGTH = 61  # tokens of a response, so that a call of 4 * 256 has 16 of the 250
LOAD = [f"{'7' * (number % 40)}{number}" for number in range(240)] + [f"{NAN}{number}" for number in range(10)]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("use", "respawned"),
    [
        pytest.param(undisturbed, 0, id="no-fault"),
        pytest.param(signalled(signal.SIGKILL, 0), 1, id="kill"),
        pytest.param(signalled(signal.SIGSTOP, 1), 1, id="silent"),
    ],
)
def test_scores_are_the_same_whatever_happens_to_a_worker(use, respawned, pool, path, monkeypatch):
    runner, workers = pool
    send, calls = workers.fleet._send, []

    async def counted(worker, jobs):
        calls.append(len(jobs))
        await send(worker, jobs)

    monkeypatch.setattr(workers.fleet, "_send", counted)
    before = workers.fleet.respawned, workers.failures["not_finite"]
    scores = runner.run(use(workers))
    expected = one_by_one(path, LOAD, messages=(("user", "7"),))
    assert scores == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert [math.isnan(score) for score in scores] == [False] * 240 + [True] * 10
    assert workers.fleet.respawned - before[0] >= respawned
    assert workers.failures["not_finite"] - before[1] == 10
    assert workers.failures["worker"] == 0
    if not respawned:
        assert sum(calls) == len(LOAD) and len(calls) < len(LOAD) / 4
