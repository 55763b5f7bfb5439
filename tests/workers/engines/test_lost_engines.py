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

from dapo.workers.engines.requests import Unfinished
from dapo.workers.remote import RemoteError
from tests.support.engines.two import LONG
from tests.support.local_actors import local_sync
from tests.workers.test_rollout import PROMPT, change, group_of, largest_difference, sampling

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
    two_engines.close()


def pids(pool, number: int) -> tuple[int, int]:
    """Process of the engine's actor, and of the engine itself."""
    actor = ray.get(pool.workers[number].__ray_call__.remote(lambda worker: os.getpid()), timeout=60)
    [core] = [child.pid for child in psutil.Process(actor).children(recursive=True) if "EngineCore" in child.name()]
    return actor, core


async def until(condition, seconds: float, what: str) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, what
        await asyncio.sleep(0.02)


def serving(pool) -> list[bool]:
    return [slot.serving for slot in pool._slots]


async def groups(pool, seed: int, ended=lambda: None) -> list:
    """Two groups on each engine."""
    found = await asyncio.gather(*[group_of(pool, f"g{seed}-{i}", seed + 100 * i, 8, LONG, ended) for i in range(4)])
    return [response for group in found for response in group]


SILENT = "has not answered for|the last token is"
LOSSES = [
    pytest.param(
        signal.SIGKILL, 1, NOTICED_S, "its engine process has ended", id="process killed", marks=pytest.mark.nightly
    ),
    pytest.param(signal.SIGKILL, 0, NOTICED_S, "ActorDiedError", id="actor killed", marks=pytest.mark.nightly),
    pytest.param(signal.SIGSTOP, 1, 60.0, SILENT, id="process stopped", marks=pytest.mark.nightly),
    pytest.param(signal.SIGSTOP, 0, 60.0, "no sign of life for 10 s", id="actor stopped", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("sent", "process", "noticed_s", "reason"), LOSSES)
def test_responses_of_a_lost_engine_come_from_another_as_they_would_have(
    engines, loop, sent, process, noticed_s, reason
):
    pool, said, model = engines
    loop.run(local_sync(pool, model, "broadcast", MANY)(7))
    whole = loop.run(groups(pool, 5000))
    said.clear()

    async def harmed():
        some = asyncio.Event()
        running = asyncio.create_task(groups(pool, 5000, some.set))
        await asyncio.wait_for(some.wait(), 300)
        os.kill(pids(pool, 0)[process], sent)
        await until(lambda: not pool._slots[0].serving, noticed_s, f"not noticed: {said}")
        found = await asyncio.wait_for(running, 300)
        assert serving(pool) == [False, True], "the groups did not wait for it to come back"
        await until(lambda: all(serving(pool)), BACK_S, f"not back: {said}")
        return found

    found = loop.run(harmed())
    assert any(line.startswith("engine 0 is lost") and re.search(reason, line) for line in said), said
    again = loop.run(groups(pool, 5000))
    assert largest_difference(model, again) <= 1e-4
    for first, second, third in zip(whole, found, again, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.token_ids, third.token_ids)
        assert [span.version for span in second.policy_versions] == [7]


@pytest.mark.nightly
def test_an_engine_lost_in_a_sync_is_left_out_and_joins_with_the_new_weights(engines, loop):
    pool, said, model = engines
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        change(parameter, generator, 0.2, 0.0)
    gone: list[int] = []

    def kill(index: int) -> None:
        if index == 2 and not gone:
            gone.append(index)
            os.kill(pids(pool, 1)[1], signal.SIGKILL)

    async def run():
        await local_sync(pool, model, "broadcast", MANY, before=kill)(8)
        assert gone == [2] and pool.members() == (0,)
        responses = await group_of(pool, "alone", 10)
        await until(lambda: all(serving(pool)), BACK_S, f"not back: {said}")
        return [*responses, *await groups(pool, 5500)]

    found = loop.run(run())
    assert largest_difference(model, found) <= 1e-4
    assert {span.version for response in found for span in response.policy_versions} == {8}


def test_a_bit_that_flips_on_the_way_each_time_ends_the_sync_and_nothing_is_served_until_the_next(engines, loop):
    pool, _, model = engines

    def flip(index: int) -> None:
        transport = sync._actors.sender._transport
        if index == 2 and "send" not in vars(transport):
            send = transport.send
            transport.send = lambda k, bucket: send(
                k, bucket.index_fill_(0, torch.tensor([1000]), bucket[1000] ^ 4) if k == 2 else bucket
            )

    async def answer_past_the_pool():
        stream = pool.workers[0].generate.options(num_returns="streaming")
        return await anext(stream.remote("past the pool", PROMPT, sampling(1, 4), [Unfinished(seed=1).start()]))

    sync = local_sync(pool, model, "broadcast", MANY, before=flip)
    with pytest.raises(RemoteError, match=r"engine [01] to load weight bucket 2 of \d+, version 99: .*has digest"):
        loop.run(sync(99))
    with pytest.raises(RemoteError, match="mixture of two versions"):
        loop.run(groups(pool, 5900))
    with pytest.raises(TimeoutError):
        loop.run(asyncio.wait_for(answer_past_the_pool(), 2.0))
    loop.run(local_sync(pool, model, "broadcast", MANY)(9))
    responses = loop.run(groups(pool, 5900))
    assert largest_difference(model, responses) <= 1e-4
    assert {span.version for response in responses for span in response.policy_versions} == {9}
