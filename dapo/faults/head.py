"""Ends a run in order when Ray's head is gone; Ray would end every process of the run by itself, a minute later.

In: the head's address. Out: a cancelled run, which saves what was trained as after a signal (processes that are there
speak to each other without the head), and then `HeadLost`. Where that takes too long, for `ray start` takes the node of
the head along, with all that ran there, the process ends without it, before Ray ends it without a word.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dapo.report.console import end_at_once

EVERY_S = 1.0  # between two tries
ANSWER_S = 2.0  # for each
LAST_S = 50.0  # after the head was there last; Ray waits 60 s for it


class HeadLost(RuntimeError):
    """Says that Ray's head process (GCS) is gone, and with it the cluster."""


@asynccontextmanager
async def while_reachable(
    address: str, grace_s: float, end: Callable[[str], object] = end_at_once
) -> AsyncIterator[None]:
    """Cancels the block when nothing takes a connection at `address` (HOST:PORT) for `grace_s`, and raises HeadLost at
    its end, whatever it ended with. end: ends the process with a message where the block takes longer than Ray would
    give it."""
    task = asyncio.current_task()
    assert task is not None
    lost = (
        f"Ray's head process (GCS) at {address} has not answered for {grace_s:g} s, and its cluster is lost; start Ray "
        "again where it was not started by this run: the same command continues from the newest checkpoint"
    )
    # A thread's, because the block may hold the event loop up.
    late = threading.Timer(
        LAST_S - grace_s, end, [f"{lost}, which holds less than was trained: there was no saving it"]
    )
    late.daemon = True

    def cancel(watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            late.start()
            task.cancel()

    watch = asyncio.create_task(_until_gone(address, grace_s))
    watch.add_done_callback(cancel)
    try:
        yield
    finally:
        late.cancel()
        if watch.done():
            raise HeadLost(lost)
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
