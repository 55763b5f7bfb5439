"""Responses that are put down at random, with engines in the test's own process: every token once, and none missing."""

import asyncio
import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.data.order import PromptOrder
from dapo.ground.clock import PhaseClock
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.draws import DROPPED
from dapo.sampling.seeds import continued_seed, response_seed
from dapo.sampling.stream import GroupStream
from dapo.types import Request, Response, Sampling, VersionSpan
from dapo.workers.engines.requests import NOTHING, Unfinished, joined
from dapo.workers.rollout import RolloutPool
from tests.support.driver.loops import PROMPTS, some_mixed
from tests.support.engines.played import SLOTS, STOP, World, assert_experts, assert_support, played_pool, text_of
from tests.support.fakes import FakeRewards

CAP, N = 24, 4
SAMPLING = Sampling(n=N, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=CAP, experts=True)
PROMPT = np.arange(5, dtype=np.int32)
MOVES = st.lists(st.tuples(st.sampled_from(["down"] * 6 + ["down and lost", "lost"]), st.integers(0, 40)), max_size=8)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def put_down(pool: RolloutPool, world: World, *, lost: bool = False, update: bool = False) -> None:
    """Puts down, and takes up again. lost: an engine dies meanwhile. update: the weights change."""
    await pool.put_down()
    made = len(world.log)
    assert all(slot.load == 0 for slot in pool._slots) and pool.room(1) == pool.spare == 0
    await turns(20)
    assert len(world.log) == made, "nothing is generated"
    if lost:
        pool._slots[0].die()
    world.version += update
    pool.admit(pool.members())


async def play(pool: RolloutPool, world: World, moves: list[tuple[str, int]]) -> None:
    for moved, count in moves:
        await turns(count)
        if "down" in moved:
            await put_down(pool, world, lost="lost" in moved, update=count % 2 == 0)
        else:
            pool._slots[1].die()
            await turns(10)
            pool.admit(pool.members())


async def group(pool: RolloutPool, found: dict[tuple[str, int], Response], k: int, background: bool = False) -> None:
    """Generates a group into `found`."""
    key, seeds = f"g{k}", range(100 * k, 100 * k + N)
    async for number, response in pool.generate(Request(key, PROMPT, SAMPLING, seeds, background)):
        assert (key, number) not in found
        found[key, number] = response


def numbers(response: Response) -> list[int]:
    """Which tokens of the log it holds."""
    return [-round(logprob) for logprob in response.rollout_logprobs.tolist()]


def audit(response: Response, world: World) -> None:
    """What it says of its tokens is what the log says."""
    tokens, spans = [world.log[number] for number in numbers(response)], response.policy_versions
    assert [token.place for token in tokens] == list(range(len(tokens))), "each follows the one before"
    assert [token.token for token in tokens] == response.token_ids.tolist()
    assert len({token.noise for token in tokens}) == len(tokens), "the noise of one token drew another"
    assert [world.log[k].version for k in numbers(response)] == [
        s.version for s in spans for _ in range(s.start, s.end)
    ]
    assert len({span.version for span in spans}) == len(spans), "spans of one version are one"
    assert_support(response.support, numbers(response))
    if not response.aborted:
        stops = [k for k, token in enumerate(tokens) if token.token == STOP]
        assert stops == ([len(tokens) - 1] if response.finish_reason == "stop" else [])
        assert len(tokens) == CAP if response.finish_reason == "length" else 0 < len(tokens) <= CAP
        assert response.text == text_of(response.token_ids) and response.engine in (0, 1)


@given(seed=st.integers(0, 10**6), moves=MOVES, aborted=st.sets(st.integers(0, 4)), when=st.integers(0, 60))
def test_every_token_stands_once_in_one_response_wherever_it_is_put_down(seed, moves, aborted, when):
    world = World(random.Random(seed))
    found: dict[tuple[str, int], Response] = {}
    lengths: list[int] = []

    async def run() -> None:
        pool = played_pool(world)
        pool._fleet.observe = lambda prompt, response, seconds: lengths.append(response)
        groups = [asyncio.create_task(group(pool, found, k)) for k in range(6)]

        async def abort() -> None:
            await turns(when)
            await pool.abort([f"g{k}" for k in aborted])

        await asyncio.wait_for(asyncio.gather(play(pool, world, moves), abort()), 30)
        await asyncio.wait_for(asyncio.gather(*groups), 30)
        assert not pool._groups and all(slot.load == 0 for slot in pool._slots)

    asyncio.run(run())
    assert len(found) == 6 * N
    for response in found.values():
        audit(response, world)
        assert_experts(response.experts, len(PROMPT), len(response.token_ids))
    assert {key for (key, _), response in found.items() if response.aborted} <= {f"g{k}" for k in aborted}
    kept = [number for response in found.values() for number in numbers(response)]
    assert sorted(kept) == sorted(set(range(len(world.log))) - world.lost), "each token once, none forgotten"
    whole = sorted(len(response.token_ids) for response in found.values() if not response.aborted)
    assert Counter(whole) <= Counter(lengths) and len(lengths) <= len(found), "the capacity sees whole lengths, once"


@given(seed=st.integers(0, 10**6), counts=st.lists(st.integers(0, 60), max_size=6))
def test_what_lent_engines_put_down_goes_on_in_the_others_at_once(seed, counts):
    world = World(random.Random(seed))
    found: dict[tuple[str, int], Response] = {}

    async def run() -> None:
        pool = played_pool(world, engines=3, lent=2)
        groups = [asyncio.create_task(group(pool, found, k, background=k == 5)) for k in range(6)]
        for count in counts:
            await turns(count)
            await pool.put_down()
            assert [slot.serving for slot in pool._slots] == [True, False, False] and pool.serving
            assert all(slot.load == 0 for slot in pool._slots[1:]), "the actors may have the GPUs"
            await turns(count)
            assert all(slot.load == 0 for slot in pool._slots[1:]), "nothing is sent there"
            assert pool.members() == (0,) and pool.members(lent=True) == (1, 2)
            pool.admit(pool.members(lent=True))
            assert pool.has_turn(1)
        await asyncio.wait_for(asyncio.gather(*groups), 30)

    asyncio.run(run())
    assert len(found) == 6 * N and not any(response.aborted for response in found.values())
    kept = [number for response in found.values() for number in numbers(response)]
    assert sorted(kept) == list(range(len(world.log))), "each token once, none forgotten"
    assert {response.engine for (key, _), response in found.items() if key == "g5"} == {0}, "off what may sleep"


def test_room_counts_what_runs_and_what_runs_in_the_background_takes_what_is_spare() -> None:
    async def run() -> None:
        pool, found = played_pool(World(random.Random(0))), {}
        slots = 2 * SLOTS
        assert (pool.room(1), pool.room(N), pool.spare) == (slots + 2, (slots + 2 * N) // N, slots)
        aside, ahead = (
            asyncio.create_task(group(pool, found, 0, background=True)),
            asyncio.create_task(group(pool, found, 1)),
        )
        await turns(1)
        assert (pool.room(1), pool.spare) == (slots + 2 - N, slots - 2 * N)
        seen = set()
        while not (aside.done() and ahead.done()):
            ended = sum(key == "g1" for key, _ in found)
            assert (pool.room(1), pool.spare) == (slots + 2 - N + ended, slots - 2 * N + len(found))
            seen.add(len(found))
            await turns(1)
        assert (pool.room(1), pool.spare) == (slots + 2, slots) and len(seen) > 3, "responses end one by one"

    asyncio.run(run())


class Watched(RolloutPool):
    """Hands over what it generates, and keeps it by group."""

    def __init__(self, pool: RolloutPool) -> None:
        self.__dict__ |= pool.__dict__
        self.given: dict[str, list[Response]] = {}

    async def generate(self, request, prefix=None):
        self.given[request.key] = []
        async for number, response in super().generate(request, prefix):
            self.given[request.key].append(response)
            yield number, response


@settings(max_examples=settings.default.max_examples // 3)
@given(seed=st.integers(0, 10**6), staleness=st.integers(1, 2))
def test_the_ledger_counts_tokens_that_were_put_down_once(seed, staleness):
    """Steps of a stream whose engines put everything down for each update, and now and then within a step."""
    world = World(random.Random(seed))
    buffer = OversamplingBuffer(train_batch_size=3, max_in_flight=12, max_staleness=staleness, total_steps=6)

    async def sometimes(pool: RolloutPool) -> None:
        while True:
            await turns(world.rng.randrange(100))
            await put_down(pool, world)

    def on_the_way(pool: Watched, stream: GroupStream) -> int:
        """Tokens of draws in generation: of responses that have ended, and of those that are put down."""
        running = [key for key, (index, _) in stream._running.items() if buffer.draws.live[index].tokens == 0]
        ended = sum(len(response.token_ids) for key in running for response in pool.given.get(key, ()))
        down = [one.so_far for key in running if key in pool._groups for one in pool._groups[key].left.values()]
        return ended + sum(len(response.token_ids) for response in down)

    async def run() -> None:
        pool = Watched(played_pool(world))
        order = PromptOrder(PROMPTS, seed=0, shuffle=True)
        stream = GroupStream(order, buffer, pool, FakeRewards(some_mixed), SAMPLING, seed=seed, clock=PhaseClock())
        used: set[int] = set()
        for version in range(5):
            buffer.serving(version)
            within = asyncio.create_task(sometimes(pool))
            full = asyncio.create_task(stream.collect())
            while not buffer.full:
                await asyncio.sleep(0)
            within.cancel()
            await asyncio.wait([within])
            pool.admit(pool.members())
            collected = await asyncio.wait_for(full, 30)
            responses = [response for group in collected.drawn for response in group.responses]
            for response in responses:
                audit(response, world)
                assert min(span.version for span in response.policy_versions) >= version - staleness
            tokens = [number for response in responses for number in numbers(response)]
            assert not used & set(tokens) and len(set(tokens)) == len(tokens), "trained on once"
            used |= set(tokens)
            await pool.put_down()
            buffer.trained()
            assert sum(buffer.draws.tokens[fate] for fate in ("trained", *DROPPED)) == len(used)
            assert buffer.draws.generated_tokens + on_the_way(pool, stream) == len(world.log), "each is on the books"
            world.version += 1
            pool.admit(pool.members())
        await stream.close()
        assert sum(len(one.policy_versions) > 1 for given in pool.given.values() for one in given) > 0

    asyncio.run(run())


def part(first: int, count: int, version: int, reason: str = "abort") -> Response:
    """Tokens first, first + 1, ... of one version."""
    return Response(
        token_ids=np.arange(first, first + count, dtype=np.int32),
        rollout_logprobs=-np.arange(first, first + count, dtype=np.float32),
        text="all of it",
        finish_reason=reason,
        policy_versions=(VersionSpan(version=version, start=0, end=count),) if count else (),
        engine=first,
        seconds=2.0,
    )


def test_parts_make_one_response_of_the_engine_and_reason_that_ended_it():
    unfinished = Unfinished(seed=7)
    assert unfinished.start().seed == 7 and len(unfinished.start().token_ids) == 0
    unfinished.add(part(0, 0, 3))
    unfinished.add(part(0, 2, 3))
    start = unfinished.start()
    assert start.token_ids.tolist() == [0, 1] and start.seed == 7
    unfinished.add(part(2, 3, 3))
    whole = unfinished.add(part(5, 1, 4, "length"))
    assert whole.token_ids.tolist() == [0, 1, 2, 3, 4, 5] == (-whole.rollout_logprobs).tolist()
    assert [(span.version, span.start, span.end) for span in whole.policy_versions] == [(3, 0, 5), (4, 5, 6)]
    assert (whole.finish_reason, whole.text, whole.engine, whole.seconds) == ("length", "all of it", 5, 8.0)
    assert whole.token_ids.dtype == np.int32 and whole.rollout_logprobs.dtype == np.float32
    first, nothing = part(0, 4, 1), part(4, 0, 2, "stop")
    whole = joined(first, nothing)
    assert whole.token_ids.tolist() == [0, 1, 2, 3] and whole.policy_versions == first.policy_versions
    assert (whole.finish_reason, whole.seconds) == ("stop", 4.0)
    assert joined(NOTHING, first) == first


def test_the_seed_of_a_continuation_is_new_at_each_place_and_for_each_response():
    seeds = [continued_seed(response_seed(0, draw), tokens) for draw in range(20) for tokens in range(50)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[50 * 3 + 4] == continued_seed(response_seed(0, 3), 4)
