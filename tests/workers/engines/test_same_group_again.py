"""One engine has a group that the driver gave up: it ends, the engine sleeps, and the draw starts again by its name."""

import asyncio
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dapo.types import Request, Sampling
from dapo.workers.engines.life import LifeSigns
from dapo.workers.engines.worker import RolloutWorker, Start
from dapo.workers.remote import RemoteError
from tests.support.engines.played import World, played_pool

PROMPT = np.arange(3, dtype=np.int32)
STARTS = [Start(token_ids=np.zeros(0, dtype=np.int32), seed=seed) for seed in range(2)]


def sampling(n: int, max_tokens: int) -> Sampling:
    return Sampling(n=n, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=max_tokens)


class Engine:
    """Stands for vLLM: a request runs until `end`, or until it is aborted."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[str]] = {}
        self.asked: list[str] = []

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        assert name not in self.running, "as vLLM requires"
        self.running[name] = asyncio.get_running_loop().create_future()
        reason = await self.running[name]
        del self.running[name]
        logprobs = SimpleNamespace(logprobs=[-1.0], start_indices=[0])
        yield SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=[7], finish_reason=reason, logprobs=logprobs, weight_versions=())]
        )

    async def abort(self, names: list[str]) -> None:
        for name in names:
            self.running[name].set_result("abort")

    async def sleep(self, level: int) -> None:
        assert not self.running, "nothing is computed while it sleeps"
        self.asked.append("sleep")

    async def collective_rpc(self, name: str, kwargs: Any = None) -> None:
        self.asked.append(name)

    def end(self) -> None:
        for request in self.running.values():
            request.set_result("stop")


def made() -> tuple[RolloutWorker, Engine]:
    worker, engine = RolloutWorker(), Engine()
    worker._engine, worker._running, worker._decode, worker._life = engine, {}, lambda ids, **_: "text", LifeSigns()
    worker._asleep = worker._stirring = worker._keeps = worker._goes_on = False
    worker._version, worker._paused = 0, True  # so that vLLM alone ends requests
    worker._vocabulary = 50
    return worker, engine


async def begun(worker: RolloutWorker) -> "asyncio.Task[list[str]]":
    """A group that runs; it gives the reasons of its ends."""

    async def reasons() -> list[str]:
        parts = [part async for part in worker.generate("v3-d7", PROMPT, sampling(2, 8), STARTS)]
        return [response.finish_reason for part in parts for _, response in part]

    task = asyncio.create_task(reasons())
    await turns()
    return task


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_engine_sleeps_where_a_group_is_about_to_end_and_refuses_where_one_goes_on() -> None:
    async def body() -> None:
        worker, engine = made()
        given_up = await begun(worker)
        await worker.abort(["v3-d7"])
        await worker.sleep(2)
        assert worker._asleep and await given_up == ["abort"] * 2
        worker._asleep = False
        wanted = await begun(worker)
        with pytest.raises(RuntimeError, match="1 groups run on an engine that is to sleep"):
            await worker.sleep(2)
        engine.end()
        assert await wanted == ["stop"] * 2

    asyncio.run(asyncio.wait_for(body(), 30))


def test_an_engine_that_a_failed_sync_has_woken_by_half_sleeps_again() -> None:
    """New ranks would load their model beside its weights, which are awake for the sync."""
    worker, engine = made()
    worker._asleep = worker._stirring = True
    for _ in range(2):
        asyncio.run(worker.sleep(2))
    assert engine.asked == ["leave_weight_sync", "sleep"], "the second time it is asleep"


def test_the_former_one_ends_and_the_latter_is_whole() -> None:
    async def body() -> None:
        worker, engine = made()
        former = await begun(worker)
        latter = await begun(worker)
        assert await former == ["abort"] * 2
        await turns()
        assert [*worker._running] == ["v3-d7"] and len(engine.running) == 2, "it can be aborted, and counts"
        engine.end()
        assert await latter == ["stop"] * 2 and worker._running == {}
        third = await begun(worker)
        await worker.abort(["v3-d7"])
        assert await third == ["abort"] * 2

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_group_that_is_closed_is_asked_to_end_before_the_next_of_its_name_is_asked_for() -> None:
    """Ray keeps the order of a caller's calls; the other way round the engine would end the new group."""

    async def body() -> None:
        pool = played_pool(World(rng=random.Random(0)), engines=1)
        asked: list[str] = []
        engine = pool._slots[0].worker

        def noted(name: str, call: Any) -> Any:
            return SimpleNamespace(remote=lambda *given: asked.append(name) or call(*given))

        engine.generate = SimpleNamespace(options=lambda num_returns: noted("generate", engine._generate))
        engine.abort = noted("abort", engine._abort)
        for _ in range(2):
            group = pool.generate(Request("v3-d7", PROMPT, sampling(8, 90), range(8)))
            await anext(group)
            await group.aclose()
        assert asked == ["generate", "abort"] * 2 and not pool._groups
        await turns()
        assert engine._known["v3-d7"], "it was asked to end"

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_group_that_no_engine_may_generate_ends_with_the_reason() -> None:
    async def body(pool: Any) -> None:
        await anext(pool.generate(Request("v3-d7", PROMPT, sampling(8, 90), range(8))))

    lost, mixed = (played_pool(World(rng=random.Random(0))) for _ in range(2))
    lost.keeper.exhausted = "0 engines are left"
    mixed.refuse("a mixture of two versions")
    for pool, reason in ((lost, "0 engines are left"), (mixed, "a mixture of two versions")):
        with pytest.raises(RemoteError, match=reason):
            asyncio.run(body(pool))
