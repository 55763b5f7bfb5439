"""The ranks' half of a weight sync, asked of stand-ins: who is told to let go of the engines, and how."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from dapo.workers import actor
from dapo.workers.actor import BESIDE, ActorPool


async def at_once() -> None: ...


async def never() -> None:
    await asyncio.Event().wait()


async def dead() -> None:
    raise RayActorError


@pytest.mark.parametrize("answer", [at_once, never, dead])
def test_rank_0_alone_lets_go_and_one_that_cannot_holds_nobody_up(monkeypatch, answer):
    """It may hang in a broadcast, so that it is told beside that, and without the turn that its call holds."""
    monkeypatch.setattr(actor, "CLOSE_S", 0.2)
    asked = []

    def rank(number: int) -> SimpleNamespace:
        async def remote(group: str, transport: str) -> None:
            asked.append((number, group, transport))
            await answer()

        def options(concurrency_group: str) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda transport: remote(concurrency_group, transport))

        return SimpleNamespace(close_weights=SimpleNamespace(options=options))

    pool = object.__new__(ActorPool)
    pool._ranks = SimpleNamespace(workers=[rank(0), rank(1)])  # a call by `Ranks.call`, which takes turns, would fail
    began = time.monotonic()
    asyncio.run(pool.close_weights("broadcast"))
    assert time.monotonic() - began < 10
    assert asked == [(0, BESIDE, "broadcast")]
