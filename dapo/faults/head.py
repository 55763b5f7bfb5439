"""Ends a run in order when Ray's head is gone; Ray would end every process of the run by itself, a minute later.

In: the head's address. Out: a cancelled run, which saves what was trained as after a signal (processes that are there
speak to each other without the head), and then `HeadLost`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

EVERY_S = 1.0  # between two tries
ANSWER_S = 2.0  # for each


class HeadLost(RuntimeError):
    """Says that Ray's head process (GCS) is gone, and with it the cluster."""


@asynccontextmanager
async def while_reachable(address: str, grace_s: float) -> AsyncIterator[None]:
    """Cancels the block when nothing takes a connection at `address` (HOST:PORT) for `grace_s`, and raises HeadLost at
    its end, whatever it ended with."""
    task = asyncio.current_task()
    assert task is not None
    watch = asyncio.create_task(_until_gone(address, grace_s))
    watch.add_done_callback(lambda done: done.cancelled() or task.cancel())
    try:
        yield
    finally:
        if watch.done():
            raise HeadLost(
                f"Ray's head process (GCS) at {address} has not answered for {grace_s:g} s, and its cluster is lost; "
                "start Ray again where it was not started by this run: the same command continues from the newest "
                "checkpoint"
            )
        watch.cancel()
        await asyncio.wait([watch])


async def _until_gone(address: str, grace_s: float) -> None:
    missed = 0  # tries in a row; not seconds, for this process may have stood still itself
    while missed * EVERY_S < grace_s:
        missed = 0 if await _answers(address) else missed + 1
        await asyncio.sleep(EVERY_S)


async def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), ANSWER_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
