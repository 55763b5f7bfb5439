"""Pools that end or are cancelled while a role still waits for its place: no wait outlives them."""

import asyncio
import threading
import time

import pytest

from dapo.config.schema import Config
from dapo.driver import fleet


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
