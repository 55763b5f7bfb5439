"""When responses are scored: as they end, not with their group; and what is checked before a batch is handed out."""

import asyncio

import pytest

from dapo.measure.clock import PhaseClock
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


async def group_of(rollouts, rewards, wanted=lambda: True):
    responses = rollouts.generate("key", DRAW.prompt.token_ids, SETTINGS, range(SETTINGS.n))
    return await scored_group(DRAW, responses, rewards, PhaseClock(), wanted)


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
