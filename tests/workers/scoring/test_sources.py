"""Sources with reward functions of their own, in real child processes."""

import asyncio
from dataclasses import replace

from dapo.config.reward import LimitsConfig, RemoteConfig, RewardFunctionConfig
from dapo.workers.scoring.children import Children
from tests.support.rewards.reward_children import item

SPINS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while solution_str == "spin":
        pass
    return {"score": 2.0 * (solution_str == ground_truth), "acc": solution_str == ground_truth}
"""
ASKS = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(60)
"""


def test_each_source_is_scored_by_its_own_functions(tmp_path):
    (tmp_path / "mine.py").write_text(SPINS)
    mine = RewardFunctionConfig(path=str(tmp_path / "mine.py"), wrong=-3.0)
    own = {"words": [mine], "both": [RewardFunctionConfig(), replace(mine, weight=0.5)]}
    entries, texts = ("", "words", "both", "other"), ("7", "Answer: 7", "spin")

    async def scored():
        limits = LimitsConfig(cpu_s=1.0, wall_s=5.0)
        async with Children([RewardFunctionConfig()], limits, 2, own=own) as children:
            items = [replace(item(text), entry=entry) for entry in entries for text in texts]
            return children.about, list(await asyncio.gather(*[children.score(one) for one in items]))

    about, verdicts = asyncio.run(scored())
    assert about["reads_last"] is None and about["without_canary"] == ["words:compute_score", "both:compute_score"]
    parts = [verdict.score.parts for verdict in verdicts]
    assert [verdict.score.accuracy for verdict in verdicts] == [0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert parts[:3] == parts[9:] == [{"math": -1.0}, {"math": 1.0}, {"math": -1.0}]
    assert parts[3:5] == [{"words:compute_score": 2.0}, {"words:compute_score": 0.0}]
    assert parts[6:8] == [
        {"both:math": -1.0, "both:compute_score": 2.0},
        {"both:math": 1.0, "both:compute_score": 0.0},
    ]
    # At a limit the functions of the source say what is wrong.
    assert [verdicts[place].score.failure for place in (5, 8)] == ["cpu", "cpu"]
    assert verdicts[5].score.reward == -3.0 and verdicts[8].score.reward == -1.0 + 0.5 * -3.0


def test_a_source_that_asks_nobody_waits_for_none_that_does(tmp_path):
    (tmp_path / "asks.py").write_text(ASKS)
    own = {"judged": [RewardFunctionConfig(path=str(tmp_path / "asks.py"))]}

    async def scored():
        async with Children([RewardFunctionConfig()], LimitsConfig(), 1, RemoteConfig(), 1, own=own) as children:
            judged = asyncio.ensure_future(children.score(replace(item("7"), entry="judged")))
            await asyncio.sleep(0.1)  # its only slot is taken
            plain = await asyncio.wait_for(children.score(item("Answer: 7")), 60)
            assert not judged.done()
            judged.cancel()
            return plain

    assert asyncio.run(scored()).score.accuracy == 1.0
