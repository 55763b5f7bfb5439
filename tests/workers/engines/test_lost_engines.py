"""Real vLLM engines that are killed or stopped: what they had not ended comes from others, and they come back."""

import asyncio
import os
import re
import signal
import time

import numpy as np
import psutil
import pytest
import ray
import torch

from dapo.report.watchdog import Watchdog
from tests.support.engines.two import LONG
from tests.support.local_actors import local_sync
from tests.workers.test_rollout import PROMPT, change, group_of, largest_difference, sampling
from workers.engines.unfinished import Unfinished
from workers.remote import RemoteError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]

NOTICED_S = 20.0  # a guard against hanging: a quiet machine needs 0.3 s
BACK_S = 600.0  # a start takes 25 s on a quiet machine
MANY = 100_000  # bytes of a bucket: the model takes many


@pytest.fixture(scope="module")
def engines(two_engines):
    """(pool of two engines, what it said, the same model in transformers)."""
    pool, model = two_engines.fresh()
    pool._cfg.stall_timeout_s = 10
    yield pool, two_engines.said, model
    two_engines.close()  # the last test leaves one of them


def pids(pool, number: int) -> tuple[int, int]:
    """Process of the engine's actor, and of the engine itself."""
    actor = ray.get(pool.workers[number].__ray_call__.remote(lambda worker: os.getpid()), timeout=60)
    [core] = [child.pid for child in psutil.Process(actor).children(recursive=True) if "EngineCore" in child.name()]
    return actor, core


async def until(condition, seconds: float, what: str) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, what
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def serving(pool) -> list[bool]:
    return [slot.serving for slot in pool._slots]


async def groups(pool, seed: int, ended=lambda: None) -> list:
    """Two groups on each engine."""
    found = await asyncio.gather(*[group_of(pool, f"g{seed}-{i}", seed + 100 * i, 8, LONG, ended) for i in range(4)])
    return [response for group in found for response in group]


LOSSES = [
    pytest.param(signal.SIGKILL, 1, NOTICED_S, "its engine process has ended", id="process killed"),
    pytest.param(signal.SIGKILL, 0, NOTICED_S, "ActorDiedError", id="actor killed", marks=pytest.mark.long),
    pytest.param(
        signal.SIGSTOP, 1, 60.0, "has not answered for|the last token is", id="process stopped", marks=pytest.mark.long
    ),
    pytest.param(signal.SIGSTOP, 0, 60.0, "no sign of life for 10 s", id="actor stopped", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("sent", "process", "noticed_s", "reason"), LOSSES)
def test_responses_of_a_lost_engine_come_from_another_as_they_would_have(
    engines, loop, sent, process, noticed_s, reason
):
    pool, said, model = engines
    sync = local_sync(pool, model, "broadcast", MANY)
    loop.run(sync(7))
    whole = loop.run(groups(pool, 5000))
    said.clear()

    told: list[str] = []

    async def harmed():
        some = asyncio.Event()
        running = asyncio.create_task(groups(pool, 5000, some.set))
        await asyncio.wait_for(some.wait(), 300)
        os.kill(pids(pool, 0)[process], sent)
        seconds = await until(lambda: not pool._slots[0].serving, noticed_s, f"not noticed: {said}")
        found = await asyncio.wait_for(running, 300)
        assert serving(pool) == [False, True], "the groups did not wait for it to come back"
        back = await until(lambda: all(serving(pool)), BACK_S, f"not back: {said}")
        print(f"{reason}: noticed after {seconds:.1f} s, serves again after {back:.1f} s more")
        return found

    with Watchdog(3.0, say=told.append):
        found = loop.run(harmed())
    assert any(re.fullmatch(r"waiting \d+ s for engine 0 to start", line) for line in told), told
    if sent == signal.SIGSTOP:
        doing = r"waiting \d+ s for engine 0: \d+ requests, version 7, last token \d+ s ago"
        assert any(re.fullmatch(doing, line) for line in told), told
    assert all(re.search(r"last token \d s ago", line) for line in told if "engine 1" in line), "it goes on generating"
    for first, second in zip(whole, found, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        assert [span.version for span in second.policy_versions] == [7]
    assert any(line.startswith("engine 0 is lost") and re.search(reason, line) for line in said), said
    again = loop.run(groups(pool, 5000))
    assert largest_difference(model, again) <= 1e-4
    assert all((first.token_ids == second.token_ids).all() for first, second in zip(whole, again, strict=True))


def test_an_engine_lost_in_a_sync_is_left_out_and_joins_with_the_new_weights(engines, loop):
    pool, said, model = engines
    said.clear()
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        change(parameter, generator, 0.2, 0.0)

    def kill(index: int) -> None:
        if index == 2 and serving(pool) == [True, True] and not gone:
            gone.append(index)
            os.kill(pids(pool, 1)[1], signal.SIGKILL)

    gone: list[int] = []
    sync = local_sync(pool, model, "broadcast", MANY, before=kill)

    async def run():
        began = time.monotonic()
        await sync(8)
        print(f"the sync took {time.monotonic() - began:.1f} s")
        assert gone == [2] and pool.members() == (0,)
        responses = await group_of(pool, "alone", 10)
        await until(lambda: all(serving(pool)), BACK_S, f"not back: {said}")
        return responses, await groups(pool, 5500)

    alone, both = loop.run(run())
    assert largest_difference(model, alone) <= 1e-4 and largest_difference(model, both) <= 1e-4
    assert {span.version for response in [*alone, *both] for span in response.policy_versions} == {8}


def test_an_abort_ends_groups_whose_engine_is_lost(engines, loop):
    pool, said, model = engines
    loop.run(local_sync(pool, model, "broadcast", MANY)(8))
    said.clear()
    actor, _ = pids(pool, 0)

    async def run():
        some, old = asyncio.Event(), pool.workers[0]
        held = pool.generate("held", PROMPT, sampling(8, LONG), list(range(8)))
        await anext(held)
        running = asyncio.create_task(groups(pool, 5700, some.set))
        await asyncio.wait_for(some.wait(), 300)
        os.kill(actor, signal.SIGKILL)
        await asyncio.wait_for(pool.abort([f"g5700-{i}" for i in range(4)]), 300)
        assert any(response.aborted for response in await running)
        # A group that has not yet heard of the loss, while another engine starts in that place and knows no requests.
        await until(lambda: pool.workers[0] is not old, 60.0, f"not replaced: {said}")
        assert pool._groups["held"].home == (pool._slots[0], old)
        ending = asyncio.create_task(pool.abort(["held"]))
        await asyncio.sleep(1.0)
        rest = [response async for _, response in held]
        assert len(rest) == 7 and any(response.aborted and not len(response.token_ids) for response in rest)
        await asyncio.wait_for(ending, 60)
        assert pool._groups == {}
        await until(lambda: all(serving(pool)), BACK_S, f"not back: {said}")
        assert [slot.load for slot in pool._slots] == [0, 0]

    loop.run(run())


def test_a_bit_that_flips_on_the_way_each_time_ends_the_sync_and_nothing_is_served_until_the_next(engines, loop):
    pool, _, model = engines

    def flip(index: int) -> None:
        transport = sync._actors.sender._transport
        if index == 2 and "send" not in vars(transport):
            send = transport.send
            transport.send = lambda k, bucket: send(
                k, bucket.index_fill_(0, torch.tensor([1000]), bucket[1000] ^ 4) if k == 2 else bucket
            )

    sync = local_sync(pool, model, "broadcast", MANY, before=flip)
    with pytest.raises(RemoteError, match=r"engine [01] to load weight bucket 2 of \d+, version 99: .*has digest"):
        loop.run(sync(99))
    with pytest.raises(RemoteError, match="mixture of two versions"):
        loop.run(groups(pool, 5900))
    assert loop.run(is_silent(pool, 2.0)), "nor does an engine answer that is asked past the pool"
    loop.run(local_sync(pool, model, "broadcast", MANY)(9))
    responses = loop.run(groups(pool, 5900))
    assert largest_difference(model, responses) <= 1e-4
    assert {span.version for response in responses for span in response.policy_versions} == {9}


async def is_silent(pool, seconds: float) -> bool:
    """Whether the first engine gives no response within `seconds`."""
    answer = pool.workers[0].generate.options(num_returns="streaming")
    stream = answer.remote("past the pool", PROMPT, sampling(1, 4), [Unfinished(seed=1).start()])
    try:
        await asyncio.wait_for(anext(stream), seconds)
    except TimeoutError:
        return True
    return False


def test_engines_that_are_lost_too_often_end_the_run_with_the_reason(engines, loop):
    pool, said, _ = engines
    pool._cfg.max_restarts = 0
    for slot in pool.keeper.slots:
        slot.limit.most = 0
    pool._cfg.min_engines = 2
    said.clear()

    async def run():
        os.kill(pids(pool, 1)[0], signal.SIGKILL)
        await until(lambda: bool(pool.keeper.exhausted), 60.0, "not given up")
        with pytest.raises(RemoteError, match=r"1 engines are left, and `rollout.min_engines` asks for 2"):
            await groups(pool, 5950)

    loop.run(run())
    assert any("is given up" in line for line in said)
