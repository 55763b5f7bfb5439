"""The real pool of reward workers: verdicts, overlong penalty, hanging and raising functions."""

import asyncio
import math

import pytest

from dapo.config import OverlongBufferConfig, RewardFunctionConfig
from tests.fakes import make_prompt, make_response
from workers.remote import RemoteError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

FUNCTIONS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "raise":
        raise KeyError("broken verifier")
    return 1.0 if solution_str == ground_truth else -1.0

def length(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(FUNCTIONS)
    return str(file)


def run_with_pool(path, use, *, functions=None, timeout_s=30.0, overlong=None, workers=2):
    from workers.reward import RewardPool

    async def body():
        pool = RewardPool(
            {"num_cpus": 0},
            num_workers=workers,
            functions=functions or [RewardFunctionConfig(path=path)],
            overlong=overlong or OverlongBufferConfig(enable=False),
            max_response_length=20,
            timeout_s=timeout_s,
        )
        await pool.start(60)
        try:
            return await use(pool)
        finally:
            pool.stop()

    return asyncio.run(body())


def answers(*texts_and_lengths):
    return [make_response(length, text=text) for text, length in texts_and_lengths]


def test_verdict_weights_and_overlong_penalty(path):
    functions = [RewardFunctionConfig(path=path), RewardFunctionConfig(path=path, name="length", weight=0.5)]
    overlong = OverlongBufferConfig(enable=True, len=8, penalty_factor=1.0)

    async def use(pool):
        return await pool.score(make_prompt(7), answers(("7", 12), ("7", 16), ("88", 20)))

    right, long, wrong = run_with_pool(path, use, functions=functions, overlong=overlong)
    assert (right.accuracy, right.reward) == (1.0, 1.0 + 0.5)
    assert (long.accuracy, long.reward, long.parts["overlong"]) == (1.0, 1.5 - 0.5, -0.5)
    assert (wrong.accuracy, wrong.reward, wrong.parts["length"]) == (0.0, -1.0 + 1.0 - 1.0, 2.0)


def test_a_hanging_function_makes_its_group_unscorable_and_no_other(path):
    async def use(pool):
        groups = [("7", 1)], [("hang", 1), ("7", 1)], [("7", 1)], [("0", 1)]
        scores = await asyncio.gather(*[pool.score(make_prompt(7), answers(*group)) for group in groups])
        return scores, pool.respawned, pool.unscorable_groups

    scores, respawned, unscorable = run_with_pool(path, use, timeout_s=3.0)
    assert [score.accuracy for score in (scores[0][0], scores[2][0], scores[3][0])] == [1.0, 1.0, 0.0]
    assert all(math.isnan(score.accuracy) and math.isnan(score.reward) for score in scores[1])
    assert (respawned, unscorable) == (2, 1)


def test_a_raising_function_stops_the_run_and_is_no_verdict(path):
    async def use(pool):
        await pool.score(make_prompt(7), answers(("raise", 1)))

    with pytest.raises(RemoteError, match="compute_score.*broken verifier"):
        run_with_pool(path, use)


def test_a_function_that_cannot_be_loaded_is_named(path):
    async def use(pool):
        return None

    with pytest.raises(RemoteError, match="reward.functions\\[0\\].name"):
        run_with_pool(path, use, functions=[RewardFunctionConfig(path=path, name="lenght")])
