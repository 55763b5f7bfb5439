"""Calls of a rollout function that are lost, with their worker or by themselves: the others come out all the same, and
the run ends where none comes out any more."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

import workers.trajectories
from dapo.turns.one_turn import rollout as one_turn
from dapo.turns.protocol import Trajectory
from dapo.types import Response, Sampling
from tests.support.engines.functions import LocalCall, LocalFunctions
from tests.support.engines.played import World, played_pool
from tests.support.fakes import make_prompt
from workers.remote import RemoteError
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


def failures(monkeypatch: pytest.MonkeyPatch, lengths: list[int], most: list[int]) -> list[bool]:
    """Which responses of these lengths fail, one after the other: where they are longer than `most` of their number."""
    monkeypatch.setattr(workers.trajectories, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(workers.trajectories, "MAX_FAILURES_IN_A_ROW", 4)
    left = iter(zip(lengths, most, strict=True))

    async def says(prompt: Any, generate: Any, sampling: Any) -> Trajectory:
        length, longest = next(left)
        answer = await generate([5] * (length - 1), max_tokens=1)
        if length > longest:
            raise OSError("the server takes no more")
        return Trajectory(text=answer.text)

    async def play() -> list[bool]:
        pool = TrajectoryPool(played_pool(World(rng=random.Random(0))), LocalFunctions(says), retries=0)
        prompt, found = make_prompt(3), []
        for number in range(len(lengths)):
            generated = pool.generate(f"g{number}", prompt.token_ids, SAMPLING, [number], problem=prompt)
            found += [response.failed async for _, response in generated]
        return found

    return asyncio.run(play())


def test_the_longest_responses_of_a_step_that_fail_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end together, behind all others: a function may have a server that takes only so much."""
    step = [3, 4, 5, 6, 7, 7, 8, 8, 9, 9]
    assert failures(monkeypatch, step * 2, [5] * 20) == [*[False] * 3, *[True] * 7] * 2


@pytest.mark.parametrize(
    ("lengths", "most"), [([9] * 4, [5] * 4), ([5] * 8, [5] * 4 + [0] * 4)], ids=["none-comes-out", "none-any-more"]
)
def test_a_function_that_always_fails_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], most: list[int]
) -> None:
    with pytest.raises(RemoteError, match=r"failed for 4 responses in a row.*prompt \d+, attempt \d+: "):
        failures(monkeypatch, lengths, most)
