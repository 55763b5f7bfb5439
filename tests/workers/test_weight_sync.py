"""The weight sync's pipeline on stand-ins: what overlaps, who is left out, who joins."""

import asyncio

import numpy as np
import pytest

from dapo.config.derived import resolve_transport
from dapo.config.schema import Config
from dapo.types import TrainSequence
from dapo.workers import weight_sync
from dapo.workers.remote import RemoteError
from tests.support.weights.recorder import BUCKETS, STEP_S, Recorder, in_loop, loads


@in_loop
async def test_the_next_bucket_is_gathered_while_one_loads_and_two_exist():
    ends = Recorder()
    sync = ends.sync()
    await sync(1)
    await sync(2)
    events = ends.events
    assert [e for e in events if e.startswith(("connect", "join"))][:2] == ["join 3", "connect 4"], "both at once"
    assert events.count("connect 4") == 1, "the second sync uses the same connection"
    one = events[events.index("start 0") : events.index("finish 1 done") + 1]
    assert loads(one) == list(range(BUCKETS))
    for k in range(BUCKETS - 1):
        assert one.index(f"gather {k + 1}") < one.index(f"load {k} done"), "they overlap"
        assert k == 0 or one.index(f"load {k - 1} done") < one.index(f"gather {k + 1}"), "its slot is free"
    assert one.index("start 0 done") < one.index("load 0") and one.index("finish 1") > one.index("load 5 done")
    assert ends.most == 2 and ends.existing == 0 and not ends.refused
    assert (ends.info["address"], ends.info["port"], ends.info["memory"]) == ("here", 7, {})


def fails_once(step: str, index: int):
    """A failure the first time that this step begins."""
    left = [(step, index)]

    def fail(*now):
        if [now] == left:
            left.clear()
            raise RemoteError(f"{step} {index} broke")

    return fail


def fails_always(step: str, index: int):
    raise RemoteError(f"{step} broke")


STEPS = [("connect", 4), ("start", 0), ("gather", 3), ("load", 3), ("finish", 1)]


@pytest.mark.parametrize(("step", "index"), [("join", 3), *STEPS])
def test_a_failure_anywhere_stops_the_sync_and_the_engines(step, index):
    def fail(now, at):
        if now == step and (step not in ("gather", "load") or at == index):
            raise RemoteError(f"{step} broke")

    ends = Recorder(fail)
    with pytest.raises(RemoteError, match=f"{step} broke"):
        asyncio.run(ends.sync()(1))
    assert "version 1 failed" in ends.refused
    assert "finish 1 done" not in ends.events


@pytest.mark.parametrize(("step", "index"), STEPS)
def test_an_engine_that_is_lost_in_a_sync_is_left_out_and_the_others_get_all_of_it(step, index):
    ends = Recorder(fails_once(step, index))
    ends.lost = [(1,)]
    asyncio.run(ends.sync()(1))
    assert ends.admitted == [(0, 2)] and not ends.refused
    closed = ends.events.index("close broadcast")
    assert ends.events[closed + 1] == "lose silent", "till then the others wait in a broadcast, and would seem lost too"
    assert loads(ends.events[ends.events.index("connect 3") :]) == list(range(BUCKETS))


def test_one_failure_without_a_lost_engine_is_tried_again():
    ends = Recorder(fails_once("load", 3))
    ends.lighter = [True]
    asyncio.run(ends.sync()(1))
    assert ends.admitted == [(0, 1, 2)] and not ends.refused
    assert ends.events.count("connect 4 done") == 2, "both ends forget what was on its way"
    assert ends.lighter == [True], "engines sleep as before"


def test_without_engines_a_sync_waits_for_none():
    ends = Recorder()
    ends.engines = ()
    asyncio.run(ends.sync()(1))
    assert not ends.events and ends.admitted == [()] and not ends.refused, "those that start later have their turn"


def canary(own: float) -> TrainSequence:
    """Three tokens to which the engine gives this log-probability, and the actors 0."""
    return TrainSequence(
        token_ids=np.zeros(5, dtype=np.int32),
        num_prompt_tokens=2,
        rollout_logprobs=np.full(3, own, dtype=np.float32),
        advantage=0.0,
        token_weight=0.0,
        staleness=np.zeros(3, dtype=np.int32),
    )


@in_loop
async def test_an_engine_that_starts_again_gets_the_weights_alone_and_serves_when_it_agrees_with_the_actors():
    ends = Recorder()
    sync = ends.sync()
    await sync.rejoin(1)
    assert not ends.events, "before the first sync there is nothing to join"
    await sync(1)
    ends.serving, before = (1,), len(ends.events)
    await sync.rejoin(1)
    assert len(ends.events) == before and not ends.asked_idle, "a sync has taken it along"
    ends.serving, ends.canary = (), [canary(-0.01)]
    await sync.rejoin(1)
    assert ends.admitted == [(0, 1, 2), (1,)] and ends.asked_idle == 1, "ranks may be writing a checkpoint"
    assert ends.events[-1] == "finish 1 done" and ends.events.count("connect 2") == 1
    ends.canary = [canary(-0.2)]
    with pytest.raises(RemoteError, match=r"other log-probabilities .* 0.2, `weight_sync.max_mean_logprob_diff`"):
        await sync.rejoin(2)
    assert len(ends.admitted) == 2
    ends.canary = []
    await sync(2)
    assert ends.admitted[-1] == (0, 1, 2) and ends.events.count("connect 4") == 2, "all of them meet again"


@in_loop
async def test_an_engine_joins_neither_within_an_update_nor_while_others_sleep_nor_after_a_sync_that_failed():
    ends = Recorder()
    sync = ends.sync()
    await sync(1)
    async with sync.lock:
        joining = asyncio.create_task(sync.rejoin(1))
        await asyncio.sleep(3 * STEP_S)
        assert ends.admitted == [(0, 1, 2)], "the actors' weights change meanwhile"
        await sync(2)
    await joining
    assert ends.events[-1] == "finish 2 done" and ends.admitted[-1] == (1,)
    await sync.rest()
    count = len(ends.events)
    await sync.rejoin(1)
    assert len(ends.events) == count, "the actors have the GPUs"
    ends._fail = fails_always
    with pytest.raises(RemoteError, match="broke"):
        await sync(3)
    ends._fail = lambda step, index: None
    count = len(ends.events)
    await sync.rejoin(1)
    assert len(ends.events) == count and ends.refused


@in_loop
async def test_engines_that_compute_otherwise_after_a_sleep_sleep_less_deep_and_are_compared_again():
    ends = Recorder()
    ends.canary, ends.lighter = [canary(-0.2)], [True, False, False]
    sync = ends.sync()
    await sync.rest()
    with pytest.raises(RemoteError, match=r"once more: .* that started again or slept .* \(mean difference 0.2"):
        await sync(1)
    asked = [event for event in ends.events if event.startswith("asked")]
    assert len(asked) == 3 and "mean difference 0.2" in asked[0], "once less deep, then twice in vain"
    assert not ends.admitted and ends.refused
    ends.lighter, ends.canary = [], [canary(0.0)]
    await sync(2)
    assert ends.admitted == [(0, 1, 2)]


@in_loop
async def test_rounding_over_a_few_tokens_is_told_from_other_weights_by_other_tokens():
    """An engine passes once it agrees; those beside it need not do so with the same tokens."""
    ends = Recorder()
    draws = [[canary(-0.2), canary(0.0)], [canary(0.0), canary(-0.2)], [canary(-0.2)] * 2]

    async def drawn(members):
        return draws.pop(0)

    sync = ends.sync()
    ends.canaries = drawn
    await sync(1)
    assert ends.admitted == [(0, 1, 2)] and len(draws) == 1, "no weights were sent again"
    draws[:] = [[canary(-0.2)], [canary(np.nan)], [canary(-0.3)], [canary(0.0)]]
    with pytest.raises(RemoteError, match=r"\(mean difference nan, .*, by 3 draws of tokens\)"):
        await sync.rejoin(1)
    assert len(draws) == 1


@in_loop
async def test_engines_that_are_lent_gpus_take_what_the_others_serve_by_a_connection_of_their_own():
    ends = Recorder()
    ends.lent = (2,)
    sync = ends.sync()
    assert await sync.lend() is None and not ends.events, "before the first sync there is nothing to serve"
    for version in (1, 2):
        await sync(version)
        assert ends.admitted[-1] == (0, 1)
        seconds = await sync.lend()
        assert ends.admitted[-1] == (2,) and ends.events[-1] == f"finish {version} done"
        assert seconds is not None and (BUCKETS + 2) * STEP_S <= seconds < 60
        await sync.rest()
    assert ends.opened == ["broadcast", "ipc"], "each is connected once"
    assert ends.gathered == 2 * (["broadcast"] * BUCKETS + ["ipc"] * BUCKETS) and ends.turns == 2
    await sync.rejoin(2)
    assert len(ends.admitted) == 4, "the actors have the GPUs"
    ends.awake = True
    await sync.rejoin(2)
    await sync.rejoin(1)
    assert ends.admitted[4:] == [(2,), (1,)]


@in_loop
async def test_engines_that_are_lent_gpus_in_vain_are_given_up_and_the_others_go_on():
    ends = Recorder()
    ends.lent = (1, 2)
    sync = ends.sync()
    await sync(1)
    ends._fail = fails_always
    with pytest.raises(RemoteError, match=r"broke; and once more: .* broke"):
        await sync.lend()
    assert ends.dropped == [(1, 2)] and ends.turns == 1 and not ends.refused
    assert await sync.lend() is None, "none is left"
    ends._fail = lambda step, index: None
    await sync(2)
    assert ends.admitted == [(0,), (0,)]


def test_a_sync_without_end_names_where_it_stood():
    def hang(step, index):
        if (step, index) == ("load", 2):
            ends._step = lambda *_: asyncio.sleep(60)

    ends = Recorder(hang)
    with pytest.raises(RemoteError, match=r"more than 1 s, .* loading weight bucket 2 of 6, version 1; raise"):
        asyncio.run(ends.sync(timeout_s=1)(1))
    assert ends.refused


@pytest.mark.parametrize(
    ("transport", "colocate", "resolved"),
    [
        ("auto", "none", "broadcast"),
        ("auto", "time", "ipc"),
        ("broadcast", "time", "broadcast"),
        ("auto", "lend", "broadcast"),
    ],
)
def test_auto_takes_the_nearest_way(transport, colocate, resolved):
    cfg = Config()
    cfg.weight_sync.transport, cfg.trainer.colocate = transport, colocate
    assert resolve_transport(cfg) == resolved


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(STEP_S / 5)


@pytest.mark.parametrize("staleness", [0, 1])
@in_loop
async def test_an_engine_outside_follows_behind_the_others_as_far_as_the_buffer_allows(staleness):
    ends = Recorder()
    sync = ends.sync(staleness=staleness)
    ends.outside = {3: -1}
    supply = asyncio.create_task(sync.supply(3))
    await sync(1)
    assert not ends.fetched, "the others wait for no store"
    ends.canary = [canary(-0.01)]
    await until(lambda: ends.outside_serving == {3})
    assert ends.outside == {3: 1} and ends.fetched == [(3, index) for index in range(BUCKETS)] and ends.asked_idle == 2
    await sync(2)
    assert ends.outside_serving == ({3} if staleness else set()), "one version behind"
    await until(lambda: ends.outside[3] == 2 and ends.outside_serving)
    slow = asyncio.Event()

    async def fetch(*asked):
        await slow.wait()

    ends.fetch = fetch
    for version in (3, 4, 5):
        await sync(version)
    assert not ends.outside_serving, "its link is too slow"
    slow.set()
    await until(lambda: ends.outside == {3: 5})
    assert "load version 3" not in ends.events, "it was too old before it was there"
    supply.cancel()


@in_loop
async def test_an_engine_outside_joins_only_with_the_weights_of_the_actors():
    """Neither with what they had, nor if it computes otherwise, nor with a version of before the run went back."""
    ends = Recorder()
    sync = ends.sync(staleness=3)
    await sync(1)
    ends.outside, ends.canary = {3: -1}, [canary(-0.2)]
    with pytest.raises(RemoteError, match="other log-probabilities"):
        await sync.supply(3)
    assert not ends.outside_serving
    ends.canary, ends.outside = [canary(0.0)], {3: -1}
    supply = asyncio.create_task(sync.supply(3))
    await until(lambda: ends.outside_serving)
    await sync(2)
    await until(lambda: ends.outside == {3: 2})
    await sync(1)
    assert ends.outside == {3: -1} and not ends.outside_serving, "version 2 will be another one"
    ends.fetched.clear()
    await until(lambda: ends.outside == {3: 1} and ends.outside_serving)
    assert len(ends.fetched) == BUCKETS and ends.gathered.count("store") == 3 * BUCKETS
    supply.cancel()


@in_loop
async def test_a_store_that_fails_is_tried_again_while_the_others_go_on(monkeypatch):
    monkeypatch.setattr(weight_sync, "RETRY_S", STEP_S)
    ends = Recorder(fails_once("store", 0))
    sync = ends.sync()
    ends.outside = {3: -1}
    supply = asyncio.create_task(sync.supply(3))
    await sync(1)
    await until(lambda: ends.outside == {3: 1})
    assert not ends.refused
    supply.cancel()
