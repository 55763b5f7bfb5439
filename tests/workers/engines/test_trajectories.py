"""Responses of several turns, with engines and functions in the test's process: tokens, masks, seeds, ends."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import dapo.workers.trajectories
from dapo.ground.clock import PhaseClock
from dapo.sampling.seeds import continued_seed, response_seed
from dapo.sampling.stream import scored_group
from dapo.turns.one_turn import rollout as one_turn
from dapo.turns.protocol import Trajectory
from dapo.types import Draw, Request, Response, Sampling
from dapo.workers.remote import RemoteError
from dapo.workers.trajectories import MAX_GONE, TrajectoryPool
from dapo.workers.turns import WorkerGone
from tests.support.engines.functions import LocalCall, LocalFunctions
from tests.support.engines.played import World, assert_experts, assert_support, played_pool
from tests.support.fakes import FakeRewards, make_prompt

CAP, N = 24, 4
SAMPLING = Sampling(n=N, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=CAP, experts=True)
PROMPT = make_prompt(3)
SEEDS = range(50, 50 + N)
GIVEN = (30, 31, 32)
MOVES = st.lists(st.tuples(st.sampled_from(["down", "down", "update", "lost"]), st.integers(0, 40)), max_size=8)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dapo.workers.trajectories, "RETRY_PAUSE_S", 0.0)


async def two_turns(prompt, generate, sampling):
    first = await generate(max_tokens=6)
    second = await generate(GIVEN)
    return Trajectory(text=f"{first.text} | {second.text}")


def pool_of(function: Callable | LocalFunctions, seed: int = 0, retries: int = 1) -> tuple[TrajectoryPool, World]:
    world = World(rng=random.Random(seed))
    functions = function if isinstance(function, LocalFunctions) else LocalFunctions(function)
    return TrajectoryPool(played_pool(world), functions, retries=retries), world


async def responses_of(pool, key: str = "g", seeds=SEEDS) -> list[Response]:
    generated = pool.generate(Request(key, PROMPT.token_ids, SAMPLING, seeds, problem=PROMPT))
    found = {number: response async for number, response in generated}
    return [found[number] for number in sorted(found)]


def tokens(responses: list[Response]) -> list[list[int]]:
    return [response.token_ids.tolist() for response in responses]


def test_a_function_of_one_turn_gives_what_the_engines_alone_give() -> None:
    pool, _ = pool_of(one_turn)
    alone = played_pool(World(rng=random.Random(1)))
    found, wanted = asyncio.run(responses_of(pool)), asyncio.run(responses_of(alone))
    assert tokens(found) == tokens(wanted)
    for response, other in zip(found, wanted, strict=True):
        assert response.token_mask is None
        assert (response.text, response.finish_reason) == (other.text, other.finish_reason)
        assert response.policy_versions == other.policy_versions


def expected(seed: int) -> tuple[list[int], list[bool], str]:
    """Tokens, mask and reason of `two_turns`, as the played engines count them."""
    first = sampled(seed, 6)
    given = len(first) + len(GIVEN)
    more = sampled(continued_seed(seed, given), CAP - given)
    mask = [True] * len(first) + [False] * len(GIVEN) + [True] * len(more)
    return [*first, *GIVEN, *more], mask, "stop" if more[-1] == 0 else "length"


def sampled(seed: int, cap: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < cap and 0 not in ids:
        ids.append(response_seed(seed, len(ids)) % 40)
    return ids


def test_two_turns_hold_what_was_sampled_and_what_was_given() -> None:
    pool, world = pool_of(two_turns)
    for seed, response in zip(SEEDS, asyncio.run(responses_of(pool)), strict=True):
        ids, mask, reason = expected(seed)
        assert (response.token_ids.tolist(), response.token_mask.tolist()) == (ids, mask)
        assert response.finish_reason == reason and "|" in response.text
        assert np.isnan(response.rollout_logprobs[~response.token_mask]).all()
        numbers = [-round(logprob) for logprob in response.sampled_logprobs.tolist()]
        assert not response.support.counts[~response.token_mask].any()
        assert_support(response.sampled_support, numbers)
        assert_experts(response.experts, len(PROMPT.token_ids), len(response.token_ids))
        made = [world.log[number].token for number in numbers]
        assert made == response.token_ids[response.token_mask].tolist(), "each token has its own log-probability"
        assert response.num_sampled == sum(mask) == sum(s.end - s.start for s in response.policy_versions)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "there"])
def test_all_turns_of_a_group_are_with_one_engine_for_as_long_as_it_serves(lost: bool) -> None:
    numbers: list[int] = []

    async def play() -> list[Response]:
        pool, _ = pool_of(two_turns)
        slots = pool._engines._slots
        for slot in slots:
            stream = slot.worker.generate.options(num_returns="streaming").remote
            noted = lambda *asked, number=slot.number, stream=stream: numbers.append(number) or stream(*asked)  # noqa: E731
            slot.worker.generate.options = lambda num_returns, noted=noted: SimpleNamespace(remote=noted)
        room, spare = pool.room(N), pool.spare
        task = asyncio.ensure_future(responses_of(pool))
        while not numbers:
            await asyncio.sleep(0)
        assert (pool.room(N), pool.spare) == (room - 1, spare - N), "what is with the function counts"
        slots[numbers[0]].serving = not lost
        return await task

    assert tokens(asyncio.run(play())) == [expected(seed)[0] for seed in SEEDS], "where it runs changes no token"
    assert len(numbers) == 2 * N
    assert sum(first != then for first, then in pairwise(numbers)) == lost


@given(MOVES, st.integers(0, 2**32))
def test_engines_that_rest_die_or_change_their_weights_change_no_token_of_one_version(moves, seed) -> None:
    async def play() -> tuple[list[Response], World]:
        pool, world = pool_of(two_turns, seed)
        engines = pool._engines
        task = asyncio.ensure_future(responses_of(pool))
        for move, turns in moves:
            for _ in range(turns):
                await asyncio.sleep(0)
            if move == "lost":
                engines._slots[1].die()
            elif move == "update":
                world.version += 1
            else:
                await engines.put_down()
                engines.admit(engines.members())
        responses = await task
        assert pool._groups == {} and pool._functions.open == set() and engines._groups == {}
        return responses, world

    responses, world = asyncio.run(play())
    for seed_of, response in zip(SEEDS, responses, strict=True):
        mask = response.token_mask
        assert response.token_ids.tolist() == expected(seed_of)[0], "turns that moved come out alike"
        made = [world.log[-round(logprob)] for logprob in response.sampled_logprobs.tolist()]
        assert [token.token for token in made] == response.token_ids[mask].tolist()
        versions = np.full(len(mask), -1)
        for span in response.policy_versions:
            assert (versions[span.start : span.end] == -1).all()
            versions[span.start : span.end] = span.version
        assert versions[mask].tolist() == [token.version for token in made] and (versions[~mask] == -1).all()


@given(st.integers(0, 60), st.integers(0, 2**32))
@example(turns=21, seed=13592)  # the function has answered in the turn of the event loop in which the abort comes
def test_an_abort_ends_a_group_wherever_it_is(turns, seed) -> None:
    async def play() -> None:
        pool, _ = pool_of(two_turns, seed)
        task = asyncio.ensure_future(responses_of(pool))
        for _ in range(turns):
            await asyncio.sleep(0)
        aborting = asyncio.ensure_future(pool.abort(["g", "unknown"]))  # comes after what began before
        await asyncio.wait_for(aborting, 60)
        assert pool._engines._groups == {}
        responses = await asyncio.wait_for(task, 60)
        assert turns or all(response.aborted for response in responses)
        for response in responses:
            assert len(response.token_ids) == len(response.rollout_logprobs)
            assert response.aborted or len(response.token_mask) == len(response.token_ids)
        assert pool._functions.open == set() and pool._groups == {}

    asyncio.run(play())


async def raises(prompt, generate, sampling):
    await generate(max_tokens=3)
    raise OSError("the server of the tool is away")


async def hangs(prompt, generate, sampling):
    await generate(max_tokens=3)
    await asyncio.Event().wait()


async def says_nothing(prompt, generate, sampling):
    return Trajectory(text="4")


async def gives_text(prompt, generate, sampling):
    return (await generate()).text


async def calls_twice(prompt, generate, sampling):
    await asyncio.gather(generate(), generate())


async def never_ends(prompt, generate, sampling):
    while True:
        await generate([5])


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (raises, "OSError: the server of the tool is away at line"),
        (hangs, "it did not go on within 0.05 s"),
        (says_nothing, "without a token of the policy"),
        (gives_text, "it returned str"),
        (calls_twice, "before its last call had ended"),
        (never_ends, "after its response had reached its cap"),
    ],
)
def test_a_function_that_fails_is_tried_again_and_then_unscorable_and_no_zero(function, says) -> None:
    told: list[str] = []

    async def play() -> None:
        functions = LocalFunctions(function, timeout_s=0.05)
        pool = TrajectoryPool(played_pool(World(random.Random(0))), functions, retries=1, warn=told.append)
        generated = pool.generate(Request("g", PROMPT.token_ids, SAMPLING, SEEDS, problem=PROMPT))
        rewards = FakeRewards(lambda prompt, sample, response: 1.0)
        group = await scored_group(Draw(index=3, prompt=PROMPT), generated, rewards, PhaseClock())
        assert all(response.failed for response in group.responses)
        assert all(math.isnan(score.accuracy) and score.failure == "rollout" for score in group.scores)
        assert len(functions.names) == 2 * N and functions.open == set()

    asyncio.run(play())
    assert says in told[0]


def test_what_fails_once_comes_out_as_if_it_had_not() -> None:
    failed: set[int] = set()

    async def fails_once(prompt, generate, sampling):
        first = await generate(max_tokens=6)
        if first.token_ids[0] not in failed:
            failed.add(first.token_ids[0])
            raise OSError("once")
        return Trajectory(text=first.text + (await generate(GIVEN)).text)

    pool, _ = pool_of(fails_once)
    found = asyncio.run(responses_of(pool))
    assert failed and tokens(found) == [expected(seed)[0] for seed in SEEDS]


def test_what_does_not_fit_is_not_appended() -> None:
    seconds: list[Any] = []

    async def long_winded(prompt, generate, sampling):
        first = await generate(max_tokens=4)
        second = await generate([7] * (CAP - 3))
        seconds.append((second.finish_reason, second.token_ids))
        return Trajectory(text=first.text)

    pool, _ = pool_of(long_winded)
    for response in asyncio.run(responses_of(pool)):
        assert response.token_mask is None and len(response.token_ids) <= 4 and response.truncated
    assert seconds == [("length", ())] * N


class Dying(LocalFunctions):
    """Loses the worker of each response's first `times` calls."""

    def __init__(self, times: int) -> None:
        super().__init__(one_turn)
        self.times, self.tried = times, Counter[str]()

    async def call(self, name: str) -> LocalCall:
        call, response = await super().call(name), name.rpartition("-a")[0]
        self.tried[response] += 1

        async def lost(*given: Any) -> Any:
            raise WorkerGone("another call held its event loop")

        if self.tried[response] <= self.times:
            call.begin = lost  # type: ignore[method-assign]
        return call


def test_a_worker_that_is_lost_uses_up_no_retry_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response that loses it again and again is unscorable, and ends no run."""
    monkeypatch.setattr(dapo.workers.trajectories, "MAX_FAILURES_IN_A_ROW", 2)
    rescued, hopeless = Dying(MAX_GONE), Dying(1000)
    wanted = asyncio.run(responses_of(pool_of(one_turn)[0]))
    found = asyncio.run(responses_of(pool_of(rescued, retries=0)[0]))
    assert tokens(found) == tokens(wanted)
    assert len(set(rescued.names)) == len(rescued.names) == N * (MAX_GONE + 1)
    assert all(one.failed for one in asyncio.run(responses_of(pool_of(hopeless, retries=0)[0])))
    assert set(hopeless.tried.values()) == {MAX_GONE + 1}


def failures(monkeypatch: pytest.MonkeyPatch, lengths: list[int], most: list[int]) -> list[bool]:
    """Which responses of these lengths fail, one after the other: where they are longer than `most` of their number."""
    monkeypatch.setattr(dapo.workers.trajectories, "MAX_FAILURES_IN_A_ROW", 4)
    left = iter(zip(lengths, most, strict=True))

    async def says(prompt: Any, generate: Any, sampling: Any) -> Trajectory:
        length, longest = next(left)
        answer = await generate([5] * (length - 1), max_tokens=1)
        if length > longest:
            raise OSError("the server takes no more")
        return Trajectory(text=answer.text)

    async def play() -> list[bool]:
        pool, _ = pool_of(says, retries=0)
        return [(await responses_of(pool, f"g{number}", [number]))[0].failed for number in range(len(lengths))]

    return asyncio.run(play())


def test_the_longest_responses_of_a_step_that_fail_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end together, behind all others: a function may have a server that takes only so much."""
    step = [3, 4, 5, 6, 7, 7, 8, 8, 9, 9]
    assert failures(monkeypatch, step * 2, [5] * 20) == [*[False] * 3, *[True] * 7] * 2


@pytest.mark.parametrize(
    ("lengths", "most"), [([9] * 4, [5] * 4), ([5] * 8, [5] * 4 + [0] * 4)], ids=["none-comes-out", "none-any-more"]
)
def test_a_function_that_always_fails_ends_the_run(monkeypatch, lengths, most) -> None:
    with pytest.raises(RemoteError, match=r"failed for 4 responses in a row.*prompt \d+, attempt \d+: "):
        failures(monkeypatch, lengths, most)
