"""The stream: seeds, caps, when responses are scored, and how it ends what is in flight."""

import asyncio
import itertools
from dataclasses import replace

import pytest

from dapo.data.order import PromptOrder
from dapo.ground.clock import PhaseClock
from dapo.sampling import stream as stream_module
from dapo.sampling.budget import BudgetExhausted
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.seeds import response_seed
from dapo.sampling.stream import GroupStream, scored_group
from dapo.types import Cut, Draw, Request
from tests.support.fakes import FakeRewards, FakeRollouts, make_prompt, make_response
from tests.support.faulty_pools import (
    PROMPTS,
    SETTINGS,
    BrokenRewards,
    EndlessRollouts,
    N,
    collect,
    evaluated,
    make_stream,
    run,
    some_mixed,
    steps,
    turns,
)

DRAW = Draw(index=0, prompt=make_prompt(1))


class StaircaseRollouts(FakeRollouts):
    """Ends a response only when the one before it has been scored."""

    def __init__(self, *, aborted: int = 0) -> None:
        super().__init__()
        self.scored = asyncio.Event()
        self.aborted_responses = aborted

    async def generate(self, request):
        for sample in reversed(range(request.sampling.n)):
            reason = "abort" if sample < self.aborted_responses else "stop"
            self.scored.clear()
            yield sample, make_response(3 + sample, reason)
            if reason == "stop":
                await self.scored.wait()


class SignallingRewards(FakeRewards):
    def __init__(self, rollouts):
        super().__init__(some_mixed)
        self.rollouts, self.seen = rollouts, []

    async def score(self, prompt, sample, response):
        self.seen.append((sample, len(response.token_ids)))
        self.rollouts.scored.set()
        return await super().score(prompt, sample, response)


async def group_of(rollouts, rewards, wanted=lambda: True, noted=lambda score: None):
    responses = rollouts.generate(Request("key", DRAW.prompt.token_ids, SETTINGS, range(SETTINGS.n)))
    return await scored_group(DRAW, responses, rewards, PhaseClock(), wanted, noted)


@pytest.mark.parametrize("aborted", [0, 2])
def test_scoring_starts_when_a_response_ends_and_an_aborted_group_is_cut(aborted):
    async def body():
        rollouts, noted = StaircaseRollouts(aborted=aborted), []
        rewards = SignallingRewards(rollouts)
        group = await group_of(rollouts, rewards, noted=lambda score: noted.append(score.accuracy))
        return group, rewards.seen, noted

    group, seen, heard = run(body())
    lengths = tuple(3 + sample for sample in range(SETTINGS.n))
    verdicts = [some_mixed(DRAW.prompt, sample, None) for sample in range(SETTINGS.n)]
    due = verdicts[aborted:][::-1]
    assert seen == [(sample, 3 + sample) for sample in reversed(range(aborted, SETTINGS.n))]
    if aborted:
        assert group == Cut(lengths=lengths) and group.num_tokens == 18
        assert heard and heard == due[: len(heard)], "the last verdict is not waited for"
    else:
        assert heard == due and [score.accuracy for score in group.scores] == verdicts
        assert tuple(len(response.token_ids) for response in group.responses) == lengths


def test_a_group_that_is_not_wanted_leaves_no_verdict_running():
    async def body():
        rollouts = FakeRollouts()
        return await group_of(rollouts, BrokenRewards(silent=[1]), lambda: False)

    assert isinstance(run(body()), Cut)


def test_an_evaluated_group_that_an_engine_ends_unasked_is_an_error_and_no_metric():
    async def body():
        rollouts = FakeRollouts()
        rollouts._stop.add("eval-v0-0-3-0")
        held_out = [make_prompt(number) for number in range(5)]
        await evaluated(rollouts, FakeRewards(some_mixed), held_out, SETTINGS.n)

    with pytest.raises(RuntimeError, match="group eval-v0-0-3-0 unasked"):
        asyncio.run(body())


def test_no_batch_is_handed_out_when_known_answers_fail():
    class Untrusted(FakeRewards):
        checks = 0

        async def check(self):
            self.checks += 1
            if self.checks == 3:
                raise RuntimeError("known answers are scored wrong")

    async def body():
        rewards = Untrusted(some_mixed)
        stream = make_stream(FakeRollouts(), rewards)
        try:
            await steps(stream, range(0, 2))
            with pytest.raises(RuntimeError, match="known answers"):
                await stream.collect()
            return stream.buffer.held()
        finally:
            await stream.close()

    assert len(run(body())) >= 4, "what was collected is kept"


async def silent_abort(keys: list[str]) -> None:
    await asyncio.Event().wait()


async def failing_abort(keys: list[str]) -> None:
    raise RuntimeError("the engines are gone")


@pytest.mark.parametrize("abort", [silent_abort, failing_abort])
def test_close_needs_no_answer_of_the_engines(abort, monkeypatch):
    monkeypatch.setattr(stream_module, "CLOSE_GRACE_S", 0.05)
    rollouts = EndlessRollouts()
    monkeypatch.setattr(rollouts, "abort", abort)
    stream = make_stream(rollouts)

    async def close_in_flight() -> None:
        collecting = asyncio.create_task(stream.collect())
        await turns(10)
        assert stream.buffer.in_flight == 12
        await stream.close()
        with pytest.raises(asyncio.CancelledError):
            await collecting

    run(close_in_flight())


def test_close_ends_what_a_cancelled_step_was_about_to_end(monkeypatch):
    """The ranks are lost while the engines are asked; groups that they go on with would hold up those that come again,
    under the same names."""
    rollouts, asked = EndlessRollouts(), []
    rollouts.first = 4
    stream = make_stream(rollouts)

    async def abort(keys: list[str]) -> None:
        asked.append(sorted(keys))
        if len(asked) == 1:
            await asyncio.Event().wait()
        await FakeRollouts.abort(rollouts, keys)

    monkeypatch.setattr(rollouts, "abort", abort)

    async def cancel_and_close() -> None:
        collecting = asyncio.create_task(stream.collect())
        while not asked:
            await asyncio.sleep(0)
        collecting.cancel()
        await asyncio.wait([collecting])
        await stream.close()

    run(cancel_and_close())
    assert len(asked) == 2 and asked[0] == asked[1] and len(asked[0]) == 8


def test_what_aborted_groups_had_generated_is_counted():
    rollouts = EndlessRollouts()
    rollouts.first = 4
    stream = make_stream(rollouts)

    async def one_step() -> None:
        collected = await stream.collect()
        assert len(collected.unfinished) == 8 and len(collected.lost) == 8
        assert collected.lost_tokens == stream.buffer.draws.tokens["surplus"] == 8 * N * 2
        await stream.close()

    run(one_step())


@pytest.mark.parametrize(("done", "staleness"), [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)])
def test_close_may_come_at_any_time_and_twice(done, staleness):
    """It may come before the first step, between two and in the middle of one."""
    stream = make_stream(FakeRollouts(max_turns=30), staleness=staleness)

    async def close_twice() -> None:
        if done:
            await steps(stream, range(done - 1))
            waiting = asyncio.create_task(collect(stream, done - 1))
            await turns(4)
            assert stream.buffer.in_flight > 0
        await stream.close()
        await stream.close()
        if done:
            with pytest.raises(asyncio.CancelledError):
                await waiting

    run(close_twice())
    stream.buffer.state()  # the books still balance


def test_what_is_trained_on_does_not_depend_on_timing():
    async def three_steps(timing: int) -> list[tuple[int, str]]:
        stream = make_stream(FakeRollouts(seed=timing, max_turns=9), FakeRewards(some_mixed))
        found = []
        for version in range(3):
            groups = (await collect(stream, version)).drawn
            found += [(group.draw.index, response.text) for group in groups for response in group.responses]
            stream.buffer.trained()
        await stream.close()
        return found

    seen = [run(three_steps(timing)) for timing in range(8)]
    assert len(seen[0]) >= 3 * 4 * SETTINGS.n and all(each == seen[0] for each in seen)


def test_an_unsolvable_data_set_ends_within_the_budget():
    stream = make_stream(FakeRollouts(), FakeRewards(lambda *_: 0.0), max_draws=24)
    with pytest.raises(BudgetExhausted, match="24 draws for one update, and 0"):
        asyncio.run(stream.collect())


def test_seeds_differ_by_draw_sample_version_and_repeat():
    words = list(itertools.product((0, 1), range(9), (0, 1), range(4)))
    seeds = [response_seed(*each) for each in words]
    assert len(set(seeds)) == len(seeds)
    assert response_seed(0, 1, 1, 0) == seeds[words.index((0, 1, 1, 0))]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_source_has_the_cap_of_its_own():
    seen: dict[int, int] = {}

    class Noting(FakeRollouts):
        async def generate(self, request):
            seen[int(request.key.partition("-d")[2])] = request.sampling.max_tokens
            async for each in super().generate(request):
                yield each

    prompts = [replace(prompt, entry="short" if prompt.id % 2 else "long") for prompt in PROMPTS]
    order = PromptOrder(prompts, seed=0, shuffle=True, weights={"short": 1.0, "long": 2.0})
    buffer = OversamplingBuffer(train_batch_size=4, max_in_flight=12)
    rewards, clock = FakeRewards(some_mixed), PhaseClock()
    stream = GroupStream(order, buffer, Noting(), rewards, SETTINGS, seed=7, clock=clock, caps={"short": 9})
    asyncio.run(stream.collect())
    assert len(seen) > 6 and set(seen.values()) == {9, SETTINGS.max_tokens}
    assert all((order.draw(index).prompt.entry == "short") == (cap == 9) for index, cap in seen.items())
