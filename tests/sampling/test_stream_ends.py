"""How the stream ends what is in flight: at the end of a step, when it is closed, when engines do not answer."""

import asyncio

import pytest

from dapo.sampling import stream as stream_module
from tests.support.fakes import FakeRollouts
from tests.support.faulty_pools import EndlessRollouts, N, collect, make_stream, run, steps, turns


def test_an_abort_that_fails_at_the_end_of_a_step_leaves_nothing_running():
    rollouts = EndlessRollouts("abort", 1)
    rollouts.first = 4
    stream = make_stream(rollouts)

    async def fail_and_close() -> None:
        with pytest.raises(RuntimeError, match="abort broke"):
            await stream.collect()
        await stream.close()

    run(fail_and_close())


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
