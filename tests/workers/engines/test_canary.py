"""The canary of an engine that has started again: at the run's temperature, and other tokens each time."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from dapo.config.sampling import RolloutConfig
from dapo.types import Sampling
from tests.support.fakes import make_response
from workers.rollout import RolloutPool


class Asked(RolloutPool):
    """A pool that notes what its engines are asked for, by name."""

    def __init__(self) -> None:
        self._cfg = RolloutConfig(temperature=0.6)
        self._prompt = np.arange(1, 9, dtype=np.int32)
        self.asked: dict[str, tuple[Sampling, int]] = {}

    async def _from(self, slot: Any, name: str, prompt: Any, sampling: Sampling, left: Any) -> AsyncIterator[Any]:
        self.asked[name] = sampling, left[0].seed
        yield 0, make_response()


def test_it_is_sampled_at_the_temperature_of_the_run_and_never_with_the_same_noise() -> None:
    """Tokens that rounding parts would part both sides at each attempt, and end the run."""
    pool, slot = Asked(), SimpleNamespace(number=0, restarts=1, compared=0)
    for _ in range(3):
        asyncio.run(pool._canary(slot))  # type: ignore[arg-type]
    slot.restarts = 2
    asyncio.run(pool._canary(slot))  # type: ignore[arg-type]
    assert [sampling.temperature for sampling, _ in pool.asked.values()] == [0.6] * 4, "each has a name of its own"
    assert [seed for _, seed in pool.asked.values()] == [1, 2, 3, 4]
