"""The stream with in-process fakes: order, refills, aborts, ends."""

import asyncio
import math
from dataclasses import replace

import pytest

from dapo.data.order import PromptOrder
from dapo.measure.clock import PhaseClock
from dapo.sampling.budget import BudgetExhausted
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.seeds import response_seed
from dapo.sampling.stream import GroupStream
from tests.support.driver.loops import PROMPTS, SETTINGS, some_mixed, step
from tests.support.fakes import FakeRewards, FakeRollouts
from tests.support.faulty_pools import collect


def make_stream(rollouts, rewards, *, batch: int = 4, max_batches: int = 0) -> GroupStream:
    buffer = OversamplingBuffer(train_batch_size=batch, max_in_flight=12, max_draws=12 * max_batches)
    order = PromptOrder(PROMPTS, seed=0, shuffle=True)
    return GroupStream(order, buffer, rollouts, rewards, SETTINGS, seed=7, clock=PhaseClock())


def texts(collected) -> list[tuple[int, str]]:
    return [(group.draw.index, response.text) for group in collected.drawn for response in group.responses]


def test_what_is_trained_on_does_not_depend_on_timing():
    seen = []
    for timing in range(8):
        stream = make_stream(FakeRollouts(seed=timing, max_turns=9), FakeRewards(some_mixed))

        async def three_steps(stream=stream):
            return [texts(await step(stream, version)) for version in range(3)]

        seen.append(asyncio.run(three_steps()))
    assert all(each == seen[0] for each in seen)


def test_surplus_draws_are_aborted_counted_and_drawn_again():
    rollouts = FakeRollouts(seed=3, max_turns=30)
    stream = make_stream(rollouts, FakeRewards(some_mixed))

    async def two_steps():
        first = await step(stream, 0)
        return first, list(rollouts.aborted), await collect(stream, 1)

    first, aborted, second = asyncio.run(two_steps())
    assert aborted and first.lost_tokens > 0
    assert set(aborted) <= {f"v0-d{index}" for index in first.returned}
    assert second.drawn[0].draw.index == first.drawn[-1].draw.index + 1


def test_a_failing_pool_ends_the_step_with_its_error():
    def broken(prompt, sample, response):
        raise RuntimeError("verifier broke")

    with pytest.raises(RuntimeError, match="verifier broke"):
        asyncio.run(make_stream(FakeRollouts(), FakeRewards(broken)).collect())


def test_an_unsolvable_data_set_ends_within_the_budget():
    stream = make_stream(FakeRollouts(), FakeRewards(lambda *_: 0.0), max_batches=2)
    with pytest.raises(BudgetExhausted, match="24 draws for one update, and 0"):
        asyncio.run(stream.collect())


def test_a_data_set_smaller_than_a_batch_goes_on_with_the_next_epoch():
    buffer = OversamplingBuffer(train_batch_size=8, max_in_flight=12)
    order = PromptOrder(PROMPTS[:3], seed=0, shuffle=True)
    rewards = FakeRewards(lambda prompt, sample, _: float(sample % 2))
    stream = GroupStream(order, buffer, FakeRollouts(), rewards, SETTINGS, seed=7, clock=PhaseClock())

    async def three_steps():
        return [await step(stream, version) for version in range(3)]

    draws = [group.draw for collected in asyncio.run(three_steps()) for group in collected.groups]
    assert [draw.index for draw in draws] == list(range(24))
    assert all({draw.prompt.id for draw in draws[3 * epoch :][:3]} == {0, 1, 2} for epoch in range(8))


def test_unscorable_groups_are_counted_and_replaced():
    rewards = FakeRewards(lambda prompt, sample, _: math.nan if prompt.id % 2 else float(sample % 2))
    collected = asyncio.run(make_stream(FakeRollouts(), rewards).collect())
    assert collected.outcomes["unscorable"] > 0
    assert all(group.draw.prompt.id % 2 == 0 for group in collected.groups)


def test_seeds_differ_by_draw_sample_version_and_repeat():
    words = [
        (seed, draw, version, sample)
        for seed in (0, 1)
        for draw in range(9)
        for version in (0, 1)
        for sample in range(4)
    ]
    seeds = [response_seed(*each) for each in words]
    assert len(set(seeds)) == len(seeds)
    assert response_seed(0, 1, 1, 0) == seeds[words.index((0, 1, 1, 0))]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_source_has_the_cap_of_its_own():
    seen: dict[int, int] = {}

    class Noting(FakeRollouts):
        async def generate(self, key, prompt, sampling, seeds, **how):
            seen[int(key.partition("-d")[2])] = sampling.max_tokens
            async for each in super().generate(key, prompt, sampling, seeds, **how):
                yield each

    prompts = [replace(prompt, entry="short" if prompt.id % 2 else "long") for prompt in PROMPTS]
    order = PromptOrder(prompts, seed=0, shuffle=True, weights={"short": 1.0, "long": 2.0})
    buffer = OversamplingBuffer(train_batch_size=4, max_in_flight=12)
    rewards, clock = FakeRewards(some_mixed), PhaseClock()
    stream = GroupStream(order, buffer, Noting(), rewards, SETTINGS, seed=7, clock=clock, caps={"short": 9})
    asyncio.run(step(stream, 0))
    assert len(seen) > 6 and set(seen.values()) == {9, SETTINGS.max_tokens}
    assert all((order.draw(index).prompt.entry == "short") == (cap == 9) for index, cap in seen.items())
