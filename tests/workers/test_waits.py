"""Waits for remote calls: what the watchdog tells of them, and which failures say that a worker is lost."""

import asyncio
import gc
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayError, RaySystemError

from dapo.config.sampling import RolloutConfig
from dapo.config.schema import Config
from dapo.ground.watchdog import Member, Watchdog
from dapo.pools import ActorsLost
from dapo.workers.actor import ActorPool, ActorWorker
from dapo.workers.engines.life import Pulse
from dapo.workers.engines.load import EngineMeter
from dapo.workers.engines.slot import EngineSlot
from dapo.workers.remote import RemoteError, WorkerLost, wait
from dapo.workers.training.ranks import Ranks
from tests.support.faulty_pools import turns

pytestmark = pytest.mark.usefixtures("open_waits")


def lines() -> list[str]:
    """What would be told now if every wait were 100 s older, with # for seconds that count."""
    told = Watchdog(60.0).due(time.monotonic() + 100)
    return [re.sub(r"\b1\d\d s\b", "# s", line) for line in told]


def during(work: Awaitable[object], until: Callable[[list[str]], bool] = bool) -> list[str]:
    """The lines as soon as they are as wanted, while `work` runs, which never ends by itself."""

    async def whole() -> list[str]:
        task = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(30):
                while not until(found := lines()):
                    assert not task.done(), task
                    await asyncio.sleep(0.001)
            return found
        finally:
            task.cancel()
            await asyncio.wait([task])
            await turns(5)
            assert lines() == [], "it is not waited for any more"

    return asyncio.run(whole())


async def forever(*arguments: object) -> None:
    await asyncio.Event().wait()


def test_a_remote_call() -> None:
    member = Member(role="engine", number=3, count=8, act="to start")
    assert during(wait([forever()], 3600, "the answer", "key")) == ["still waiting for the answer, after # s"]
    assert during(wait([forever()], 3600, member, "key")) == ["still waiting for engine 3 to start, after # s"]


def test_ranks_that_have_not_answered() -> None:
    async def answer(rank: int) -> None:
        if rank in (1, 3):
            await forever()

    ranks = Ranks(lambda: [None] * 4)
    asked = ranks.call(lambda rank, _: answer(rank), 3600, "the update from policy version 17", "key", changes=True)
    found = during(asked, until=lambda lines: "2 of 4" in "".join(lines))
    assert found == ["still waiting for 2 of 4 actor ranks (the update from policy version 17), after # s: 1, 3"]


def test_an_engine_that_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSlot, "_make", lambda self: None)
    slot = EngineSlot(3, {}, RolloutConfig(), count=8)
    counts = EngineMeter().read()
    owed = ((0.0, 0.25), (80.0, 95.0), (97.0, 0.0))
    pulses = [Pulse(requests=4, silent_s=s, idle_s=i, counts=counts) for s, i in owed]

    async def pulse() -> Pulse:
        return pulses.pop(0)

    slot.worker = SimpleNamespace(pulse=SimpleNamespace(remote=pulse))
    slot.version = 17
    assert asyncio.run(slot.stands_still(1.0, 120.0)) == "" and slot.silent() == 0.0, "it has nothing to do"
    slot.load = 4
    assert 0.25 <= slot.silent() < 60
    assert asyncio.run(slot.stands_still(1.0, 120.0)) == ""
    assert re.fullmatch(r"4 requests, version 17, last token (9[5-9]|1\d\d) s ago", slot.doing())
    assert asyncio.run(slot.stands_still(1.0, 120.0)) == "" and slot.silent() >= 97.0
    assert str(slot.member("to pause")) == "engine 3 to pause" and slot.member().count == 8


ERRORS = {
    "its-process-ended": (ActorDiedError(), True),
    "its-node-does-not-answer": (ActorUnavailableError("gone", b"a" * 16), True),
    "its-answer-went-with-its-node": (ObjectLostError("a" * 56, None, ""), True),
    "ray-failed": (RaySystemError("who knows"), False),
}


@pytest.mark.parametrize(("error", "lost"), ERRORS.values(), ids=ERRORS)
def test_a_worker_is_lost(error: RayError, lost: bool) -> None:
    async def fail() -> None:
        raise error

    with pytest.raises(RemoteError, match=f"while waiting for engine 3: {type(error).__name__}: ") as raised:
        asyncio.run(wait([fail()], 60.0, "engine 3", "rollout.timeout_s"))
    assert isinstance(raised.value, WorkerLost) == lost


def test_a_failure_that_nobody_waits_for_any_more_is_not_reported_by_the_event_loop() -> None:
    """Waits are cancelled and actors killed in one go where a run ends."""
    told: list[dict[str, Any]] = []

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        ref: asyncio.Future[None] = loop.create_future()
        waiting = asyncio.create_task(wait([ref], 60.0, "judge 0", ""))
        await asyncio.sleep(0)
        waiting.cancel()
        if not ref.cancelled():  # as Python 3.12 and later do it, at once
            ref.set_exception(ActorDiedError())
        await asyncio.wait({waiting})
        assert waiting.cancelled()

    asyncio.run(whole())
    gc.collect()
    assert told == []


@pytest.mark.parametrize(("losses", "error"), [(2, None), (3, ActorsLost), (-1, RemoteError)])
def test_ranks_that_are_lost_as_they_first_start_start_again(losses, error, monkeypatch, capsys):
    """Not those that all raise: the model is no better the second time."""
    loads = []

    class Lost:
        async def restart(self, key):
            loads.append("restart")

    async def load(self):
        loads.append("load")
        if losses < 0:
            raise RemoteError("no model")
        if loads.count("load") <= losses:
            raise ActorsLost("rank 1 died")

    monkeypatch.setattr(ActorPool, "_load", load)
    pool = object.__new__(ActorPool)
    pool._cfg, pool._ranks = SimpleNamespace(actor=SimpleNamespace(max_restarts=2)), Lost()
    with nullcontext() if error is None else pytest.raises(error):
        asyncio.run(pool.start())
    again = min(max(losses, 0), 2)
    assert loads == ["load", *["restart", "load"] * again]
    assert capsys.readouterr().err.count("rank 1 died") == again


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(3600.0, 600.0), (6.0, 6.0)])
def test_a_collective_that_hangs_is_found_before_its_update_is_late(timeout_s, limit_s, monkeypatch):
    limits = []
    monkeypatch.setattr("dapo.workers.actor.check_allocator", lambda cfg, device: None)
    monkeypatch.setattr("dapo.workers.actor.mesh.join", lambda *where, timeout_s, **how: limits.append(timeout_s))
    monkeypatch.setattr("dapo.workers.actor.mesh.arrange", lambda *where, timeout_s, **how: limits.append(timeout_s))
    monkeypatch.setattr("dapo.workers.actor.fsdp.load_policy", lambda cfg, mesh: 1 / 0)
    cfg = Config()
    cfg.actor.timeout_s, cfg.actor.cpu_threads = timeout_s, torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        ActorWorker(cfg, "cpu").start(0, 1, "127.0.0.1", 1)
    assert limits == [limit_s] * 2
