"""Reward workers on a second real node of Ray, and what its loss costs."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dapo.config.compose import compose
from dapo.config.reward import RewardConfig, RewardFunctionConfig
from tests.support.fakes import make_prompt, make_response
from tests.support.nodes import Node
from tests.support.runs import TINY
from workers.placement import Placement
from workers.reward import RewardPool

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]

START_S, PATIENCE_S = 120.0, 120.0  # hang guards
HELD = 40


@pytest.fixture
def second() -> Iterator[Node]:
    node = Node(gpus=0)
    yield node
    node.stop()


def test_the_loss_of_a_node_changes_no_reward(program: str, second: Node) -> None:
    """Both workers run there: their responses are scored again, by others in their place."""
    warnings: list[str] = []

    async def whole() -> tuple[set[str], list[float], set[str], float]:
        cfg = RewardConfig(functions=[RewardFunctionConfig(path=program)], num_workers=2, timeout_s=30.0)
        options = Placement(compose([], TINY), "cpu").rewards()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=second.id, soft=False)
        pool = RewardPool(options, cfg, max_response_length=20, warn=warnings.append)
        try:
            await pool.start(START_S)
            before = await places(pool)
            texts = ["7", "8"] * HELD
            scoring = [pool.score(make_prompt(7), i, make_response(1, text=text)) for i, text in enumerate(texts)]
            running = asyncio.gather(*scoring)
            await asyncio.sleep(0)
            del options["scheduling_strategy"]  # Ray heeds a soft one at times only
            second.kill()
            async with asyncio.timeout(PATIENCE_S):
                scores = await running
                while not all(worker.up for worker in pool.fleet._workers) or second.id in await places(pool):
                    again = [pool.score(make_prompt(7), i, make_response(1, text="7")) for i in range(HELD)]
                    await asyncio.gather(*again)
            return before, [score.accuracy for score in scores], await places(pool), pool.fleet.respawned
        finally:
            pool.stop()

    async def places(pool: RewardPool) -> set[str]:
        """Ids of the nodes of the workers that are up."""
        asked: list[Any] = [
            worker.handle.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
            for worker in pool.fleet._workers
            if worker.up
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return {second.id if isinstance(answer, BaseException) else answer for answer in found}

    here = ray.get_runtime_context().get_node_id()
    before, accuracies, after, respawned = asyncio.run(whole())
    assert before == {second.id}
    assert accuracies == [1.0, 0.0] * HELD
    assert after == {here} and respawned >= 2
    assert warnings
