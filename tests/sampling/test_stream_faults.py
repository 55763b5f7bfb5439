"""The stream when pools fail, keep silent, answer late or are cut off: no hang, no lost draw, nothing left running."""

import asyncio

import pytest

from dapo.sampling.seeds import response_seed
from dapo.types import Collected
from tests.support.fakes import FakeRewards, FakeRollouts, make_prompt
from tests.support.faulty_pools import (
    SEED,
    BrokenRewards,
    BrokenRollouts,
    N,
    NarrowRollouts,
    SpanRollouts,
    StubbornRollouts,
    collect,
    drawn,
    evaluated,
    make_stream,
    resumed,
    run,
    some_mixed,
    steps,
    turns,
)


@pytest.mark.parametrize(
    ("staleness", "rollouts", "rewards"),
    [
        pytest.param(0, lambda: BrokenRollouts("generate", 1), BrokenRewards, id="first generate"),
        pytest.param(0, lambda: BrokenRollouts("generate", 23), BrokenRewards, id="generate"),
        pytest.param(1, lambda: BrokenRollouts("generate", 23), BrokenRewards, id="generate, staleness 1"),
        pytest.param(0, FakeRollouts, lambda: BrokenRewards(at=1), id="first score"),
        pytest.param(0, FakeRollouts, lambda: BrokenRewards(at=17), id="score"),
        pytest.param(1, FakeRollouts, lambda: BrokenRewards(at=17), id="score, staleness 1"),
        pytest.param(0, lambda: BrokenRollouts("abort", 1, max_turns=40), BrokenRewards, id="first abort"),
        pytest.param(0, lambda: BrokenRollouts("abort", 3, max_turns=40), BrokenRewards, id="abort"),
    ],
)
def test_a_failing_pool_ends_the_run_and_the_next_one_misses_no_draw(staleness, rollouts, rewards):
    stream = make_stream(rollouts(), rewards(), staleness=staleness)
    used: list[list[int]] = []

    async def until_it_breaks() -> None:
        with pytest.raises(RuntimeError, match="broke"):
            for version in range(30):
                used.extend(await steps(stream, range(version, version + 1), update_turns=9))
        await stream.close()
        await turns(60)
        again = resumed(stream, BrokenRewards(), version=len(used), staleness=staleness)
        used.extend(await steps(again, range(len(used), len(used) + 3)))
        await again.close()

    run(until_it_breaks())
    assert [index for step in used for index in step] == list(range(4 * len(used)))


@pytest.mark.parametrize(("staleness", "silent"), [(0, range(4, 40)), (1, range(8, 40))])
def test_a_verdict_that_never_comes_holds_up_no_step_that_does_not_need_it(staleness, silent):
    """Its draw goes back, and is asked for again."""
    stream = make_stream(FakeRollouts(), BrokenRewards(silent=silent), staleness=staleness)

    async def three_steps() -> None:
        assert await steps(stream, range(3)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        await stream.close()

    run(three_steps())
    assert stream.buffer.draws.tokens["stale" if staleness else "surplus"] > 0


def test_a_late_result_of_a_draw_that_went_back_never_enters_the_buffer():
    """Engines that cannot abort; the same draw already runs again. A response's text is its seed."""
    rollouts = StubbornRollouts(seed=2, max_turns=160)
    stream = make_stream(rollouts, BrokenRewards(some_mixed), staleness=1)
    returned = 0

    def came_in_time(collected: Collected, version: int) -> bool:
        for group in collected.drawn:
            index = group.draw.index
            seeds = [[str(response_seed(SEED, index, at, s)) for s in range(N)] for at in (version - 1, version)]
            if [response.text for response in group.responses] not in seeds:
                return False
        return True

    async def many_steps() -> None:
        nonlocal returned
        for version in range(60):
            collected = await collect(stream, version)
            returned += len(collected.returned)
            assert came_in_time(collected, version)
            stream.buffer.trained()
        await stream.close()

    run(many_steps())
    assert returned > 5 and rollouts.twice > 0
    assert len(set(rollouts.seen)) == len(rollouts.seen), "a key names one request"


def test_weights_that_change_in_flight_give_tokens_of_several_versions_within_the_bound():
    rollouts = SpanRollouts(seed=1, max_turns=40)
    stream = make_stream(rollouts, BrokenRewards(some_mixed), staleness=1)
    seen: set[tuple[int, ...]] = set()

    async def many_steps() -> None:
        for version in range(20):
            collected = await collect(stream, version)
            for group in collected.groups:
                ages = tuple(version - span.version for span in group.responses[0].policy_versions)
                assert all(0 <= age <= 1 for age in ages)
                seen.add(ages)
            await turns(15)
            stream.buffer.trained()
            rollouts.version = version + 1
            await turns(2)
            stream.buffer.serving(version + 1)
        await stream.close()

    run(many_steps())
    assert seen == {(0,), (1,), (1, 0)}


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_collect_that_is_cancelled_at_any_turn_loses_no_draw(staleness):
    """While it waits, the same stream goes on; once the batch is closed, a continued run finds it."""
    ways = set()

    async def cancelled(seed: int, after: int) -> list[list[int]]:
        rollouts = FakeRollouts(seed=seed, max_turns=30)
        stream = make_stream(rollouts, BrokenRewards(some_mixed), staleness=staleness)
        task = asyncio.create_task(stream.collect())
        await turns(after)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            first = [drawn(task.result())]
        elif stream.buffer.collecting:
            ways.add("waiting")
            first = [drawn(await stream.collect())]
        else:
            ways.add("closed")
            await stream.close()
            await turns(40)
            stream = resumed(stream, BrokenRewards(some_mixed), version=0, staleness=staleness)
            first = [drawn(await stream.collect())]
        stream.buffer.trained()
        rest = await steps(stream, range(1, 3))
        await stream.close()
        return first + rest

    for seed in range(2):
        for after in range(1, 45):
            used = run(cancelled(seed, after))
            assert used == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17]]
    assert ways >= ({"waiting", "closed"} if staleness == 0 else {"waiting"})


@pytest.mark.parametrize("staleness", [0, 1])
def test_evaluation_and_the_pump_share_the_engines(staleness):
    """Neither starves the other, budgets are not charged for the wait, and no evaluated group enters the buffer."""
    held_out = [make_prompt(100 + number) for number in range(30)]
    rewards = FakeRewards(lambda prompt, sample, response: float(response.text[-1] in "02468"))

    async def together() -> tuple[list[list[int]], dict[str, float]]:
        rollouts = NarrowRollouts(max_turns=9)
        stream = make_stream(rollouts, staleness=staleness, max_draws=24)
        used = await steps(stream, range(2))
        assert rollouts.most == NarrowRollouts.capacity, "filled, and never overfilled"
        metrics = await evaluated(rollouts, rewards, held_out, 2)  # while the pump runs ahead, or rests
        used += await steps(stream, range(2, 5))
        await stream.close()
        return used, metrics

    used, metrics = run(together())
    assert used == [list(range(4 * step, 4 * step + 4)) for step in range(5)]
    assert metrics == run(evaluated(NarrowRollouts(), rewards, held_out, 2))


def test_a_failure_while_nobody_collects_is_told_by_the_next_collect():
    rewards = BrokenRewards()
    stream = make_stream(FakeRollouts(seed=3, max_turns=200), rewards, staleness=1)

    async def fail_during_the_update() -> None:
        await stream.collect()
        assert stream.buffer.in_flight > 0
        rewards.at = 1
        await turns(250)
        stream.buffer.trained()
        with pytest.raises(RuntimeError, match="score broke"):
            await collect(stream, 1)
        await stream.close()

    run(fail_during_the_update())


def test_a_group_that_an_engine_ends_unasked_is_an_error_with_its_name():
    rollouts = FakeRollouts()
    rollouts._stop.add("v0-d2")
    stream = make_stream(rollouts)

    async def fail() -> None:
        with pytest.raises(RuntimeError, match="v0-d2"):
            await stream.collect()
        await stream.close()

    run(fail())
