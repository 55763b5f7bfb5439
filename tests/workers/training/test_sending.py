"""The ranks' half of a weight sync, asked of stand-ins: who is told to let go of the engines, and how."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from workers.training import sending
from workers.training.sending import BESIDE, Sending


class Rank:
    """Notes in which of Ray's concurrency groups it is asked; answers as `answer` does."""

    def __init__(self, answer) -> None:
        self.asked: list[tuple[str, str]] = []
        self._answer = answer
        self.close_weights = SimpleNamespace(options=self._options)

    def _options(self, concurrency_group: str):
        async def remote(transport: str) -> None:
            self.asked.append((concurrency_group, transport))
            await self._answer()

        return SimpleNamespace(remote=remote)


async def at_once() -> None: ...


async def never() -> None:
    await asyncio.Event().wait()


async def dead() -> None:
    raise RayActorError


@pytest.mark.parametrize("answer", [at_once, never, dead])
def test_rank_0_alone_lets_go_and_one_that_cannot_holds_nobody_up(monkeypatch, answer):
    """It may hang in a broadcast, so that it is told beside that, and without the turn that its call holds."""
    monkeypatch.setattr(sending, "CLOSE_S", 0.2)
    ranks = [Rank(answer), Rank(answer)]
    pool = Sending()
    pool._ranks = SimpleNamespace(workers=ranks)  # a call by `Ranks.call`, which takes turns, would fail
    began = time.monotonic()
    asyncio.run(pool.close_weights("broadcast"))
    assert time.monotonic() - began < 10
    assert [rank.asked for rank in ranks] == [[(BESIDE, "broadcast")], []]
