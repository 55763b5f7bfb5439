"""Calls of a rollout function whose worker is lost, by the fault of one of them: the others come out all the same."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

import workers.trajectories
from dapo.turns.one_turn import rollout as one_turn
from dapo.types import Response, Sampling
from tests.support.engines.functions import LocalCall, LocalFunctions
from tests.support.engines.played import World, played_pool
from tests.support.fakes import make_prompt
from workers.trajectories import MAX_GONE, TrajectoryPool
from workers.turns.fleet import WorkerGone

N = 4
SAMPLING = Sampling(n=N, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=24)


class Dying(LocalFunctions):
    """Loses the worker of each response's first `times` calls."""

    def __init__(self, times: int) -> None:
        super().__init__(one_turn)
        self.times, self.tried = times, Counter[str]()

    async def call(self, name: str) -> LocalCall:
        call, response = await super().call(name), name.rpartition("-a")[0]
        self.tried[response] += 1
        if self.tried[response] <= self.times:

            async def begin(*given: Any) -> Any:
                raise WorkerGone("another call held its event loop")

            call.begin = begin  # type: ignore[method-assign]
        return call


def responses(functions: LocalFunctions, monkeypatch: pytest.MonkeyPatch) -> list[Response]:
    monkeypatch.setattr(workers.trajectories, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(workers.trajectories, "MAX_FAILURES_IN_A_ROW", 2)

    async def play() -> list[Response]:
        pool = TrajectoryPool(played_pool(World(rng=random.Random(0))), functions, retries=0)
        prompt = make_prompt(3)
        generated = pool.generate("g", prompt.token_ids, SAMPLING, range(50, 50 + N), problem=prompt)
        found = {number: response async for number, response in generated}
        return [found[number] for number in range(N)]

    return asyncio.run(play())


def test_a_worker_that_is_lost_uses_up_no_retry_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = responses(LocalFunctions(one_turn), monkeypatch)
    functions = Dying(MAX_GONE)
    found = responses(functions, monkeypatch)
    assert [one.token_ids.tolist() for one in found] == [one.token_ids.tolist() for one in wanted]
    assert len(set(functions.names)) == len(functions.names) == N * (MAX_GONE + 1)


def test_who_loses_it_again_and_again_is_unscorable_and_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = Dying(1000)
    assert all(one.failed for one in responses(functions, monkeypatch))
    assert set(functions.tried.values()) == {MAX_GONE + 1}
