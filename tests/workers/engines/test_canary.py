"""The canary of an engine that has started again is sampled as the actors compute it: at the run's temperature."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from dapo.config.sampling import RolloutConfig
from dapo.types import Sampling
from tests.support.fakes import make_response
from workers.rollout import RolloutPool


def test_it_is_sampled_at_the_temperature_of_the_run() -> None:
    asked: list[Sampling] = []

    class Asked(RolloutPool):
        def __init__(self) -> None:
            self._cfg = RolloutConfig(temperature=0.6)
            self._prompt = np.arange(1, 9, dtype=np.int32)

        async def _from(self, slot: Any, name: str, prompt: Any, sampling: Sampling, left: Any) -> AsyncIterator[Any]:
            asked.append(sampling)
            yield 0, make_response()

    asyncio.run(Asked()._canary(SimpleNamespace(number=0, restarts=1)))  # type: ignore[arg-type]
    assert [sampling.temperature for sampling in asked] == [0.6]
