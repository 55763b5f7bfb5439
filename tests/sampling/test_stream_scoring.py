"""When responses are scored: as they end, not with their group; and what is checked before a batch is handed out."""

import asyncio
from typing import ClassVar

import pytest

from dapo.measure.clock import PhaseClock
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.stream import scored_group
from dapo.types import Cut, Draw
from tests.support.fakes import FakeRewards, FakeRollouts, make_prompt, make_response
from tests.support.faulty_pools import SETTINGS, BrokenRewards, evaluated, make_stream, run, some_mixed, steps

DRAW = Draw(index=0, prompt=make_prompt(1))


class StaircaseRollouts(FakeRollouts):
    """Ends a response only when the one before it has been scored."""

    def __init__(self, *, aborted: int = 0) -> None:
        super().__init__()
        self.scored = asyncio.Event()
        self.aborted_responses = aborted

    async def generate(self, key, prompt, sampling, seeds, **how):
        for sample in reversed(range(sampling.n)):
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
    responses = rollouts.generate("key", DRAW.prompt.token_ids, SETTINGS, range(SETTINGS.n))
    return await scored_group(DRAW, responses, rewards, PhaseClock(), wanted, noted)


def test_scoring_starts_when_a_response_ends():
    async def body():
        rollouts = StaircaseRollouts()
        rewards = SignallingRewards(rollouts)
        return await group_of(rollouts, rewards), rewards.seen

    group, seen = run(body())
    assert seen == [(sample, 3 + sample) for sample in reversed(range(SETTINGS.n))]
    assert [len(response.token_ids) for response in group.responses] == [3 + sample for sample in range(SETTINGS.n)]
    assert [score.accuracy for score in group.scores] == [some_mixed(DRAW.prompt, s, None) for s in range(SETTINGS.n)]


def test_an_aborted_group_is_cut_though_some_scores_were_made():
    async def body():
        rollouts = StaircaseRollouts(aborted=2)
        rewards = SignallingRewards(rollouts)
        return await group_of(rollouts, rewards), rewards.seen

    group, seen = run(body())
    assert group == Cut(lengths=tuple(3 + sample for sample in range(SETTINGS.n))) and group.num_tokens == 18
    assert len(seen) == SETTINGS.n - 2


@pytest.mark.parametrize("aborted", [0, 2])
def test_each_score_is_noted_as_soon_as_it_is_there_and_none_of_an_aborted_response(aborted):
    async def body():
        rollouts, noted = StaircaseRollouts(aborted=aborted), []
        await group_of(rollouts, SignallingRewards(rollouts), noted=lambda score: noted.append(score.accuracy))
        return noted

    heard = run(body())
    due = [some_mixed(DRAW.prompt, sample, None) for sample in reversed(range(aborted, SETTINGS.n))]
    # Of a group that is cut the last verdict is not waited for.
    assert heard and heard == (due[: len(heard)] if aborted else due)


def test_the_buffer_hears_verdicts_while_a_draw_runs_and_none_of_a_start_that_went_back():
    class Listening(OversamplingBuffer):
        heard: ClassVar[list[tuple[bool, float]]] = []

        def verdict(self, index, accuracy):
            self.heard.append((self._runs(index), accuracy))
            super().verdict(index, accuracy)

    async def body():
        buffer = Listening(train_batch_size=4, max_in_flight=12, max_staleness=1)
        stream = make_stream(FakeRollouts(seed=1, max_turns=30))
        buffer.on_serving, stream.buffer = stream.buffer.on_serving, buffer
        try:
            return [await steps(stream, range(0, 3)), buffer.draws.metrics()]
        finally:
            await stream.close()

    _, metrics = run(body())
    assert len(Listening.heard) >= SETTINGS.n * metrics["ledger/draws_trained"]
    assert all(runs for runs, _ in Listening.heard)
    assert {accuracy for _, accuracy in Listening.heard} == {0.0, 1.0}


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


@pytest.mark.parametrize(
    "error", [KeyError("key"), OSError("gone"), RuntimeError("broke")], ids=lambda e: type(e).__name__
)
def test_close_ends_everything_whatever_the_engines_raise(error):
    class Failing(FakeRollouts):
        async def generate(self, key, prompt, sampling, seeds, **how):
            await asyncio.Event().wait()
            yield

        async def abort(self, keys):
            raise error

    async def body():
        stream = make_stream(Failing())
        collecting = asyncio.ensure_future(stream.collect())
        await asyncio.sleep(0.01)
        collecting.cancel()
        await asyncio.wait([collecting])
        await stream.close()

    run(body())  # which looks for tasks that are left
