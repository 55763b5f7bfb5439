"""Pools that end or are cancelled while a role still waits for its place: no wait outlives them."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from dapo import fleet
from dapo.config.schema import Config


def test_a_cancelled_run_waits_for_no_place(monkeypatch):
    waits = threading.Event()

    def never_placed(cfg, device, *, given_up, **told):
        waits.set()
        for _ in range(6000):
            if given_up():
                raise ValueError("the cluster is too small")
            time.sleep(0.01)
        raise AssertionError("it waits on")

    async def cancel():
        placing = asyncio.create_task(fleet.place(Config(), "cuda"))
        await asyncio.to_thread(waits.wait)
        placing.cancel()
        await placing

    monkeypatch.setattr(fleet, "Placement", never_placed)
    with pytest.raises(asyncio.CancelledError) as ended:
        asyncio.run(cancel())
    assert isinstance(ended.value.__cause__, ValueError)


class Role:
    """Stands for engines and reward workers that have nothing to do."""

    def __init__(self):
        self.keeper, self.unscored = SimpleNamespace(rejoin=None), None

    async def start(self, *arguments):
        return "started"

    async def stop(self, grace_s=0.0):
        pass

    def work(self):
        return {}


def test_the_end_of_the_pools_gives_up_every_wait_for_a_place(monkeypatch):
    ended = []

    async def place(cfg, device):
        return SimpleNamespace(give_up=lambda: ended.append("waits"))

    rewards = Role()
    rewards.stop = lambda: ended.append("reward workers")
    monkeypatch.setattr(fleet, "place", place)
    monkeypatch.setattr(fleet, "create_rollouts", lambda cfg, placed: Role())
    monkeypatch.setattr(fleet, "create_rewards", lambda cfg, placed, device: rewards)
    cfg = Config()
    cfg.trainer.only, cfg.trainer.device = "rollout", "cpu"

    async def stopped():
        async with fleet.build_pools(cfg):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(stopped())
    assert ended == ["waits", "reward workers"]
