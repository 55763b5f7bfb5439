"""Ends a run in order when Ray's head is gone; Ray would end every process of the run by itself, a minute later.

In: the head's address. Out: a cancelled run, which saves what was trained as after a signal (processes that are there
speak to each other without the head), and then `HeadLost`. Where that takes too long, for `ray start` takes the node of
the head along, with all that ran there, the process ends without it, before Ray ends it without a word.
"""

import asyncio
import socket
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
    give it.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    over, lost = threading.Event(), False
    message = (
        f"Ray's head process (GCS) at {address} has not answered for {grace_s:g} s, and its cluster is lost; start Ray "
        "again where it was not started by this run: the same command continues from the newest checkpoint"
    )

    def cancel() -> None:
        nonlocal lost
        if not over.is_set():
            lost = True
            task.cancel()

    def watch() -> None:
        missed = 0  # tries in a row; not seconds, for this process may have stood still itself
        while missed * EVERY_S < grace_s:
            if over.wait(EVERY_S):
                return
            missed = 0 if _answers(address) else missed + 1
        loop.call_soon_threadsafe(cancel)
        if not over.wait(LAST_S - grace_s):
            end(f"{message}, which holds less than was trained: there was no saving it")

    # A thread, because calls of Ray that wait for its head hold the event loop up.
    threading.Thread(target=watch, name="head", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        if lost:
            raise HeadLost(message)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_S):
            return True
    except OSError:
        return False
