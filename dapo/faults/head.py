"""Ends a run in order when Ray's head is gone; Ray would end every process of the run by itself, a minute later.

In: the head's address. Out: a cancelled run, which saves what was trained as after a signal (processes that are there
speak to each other without the head), and then `HeadLost`. Where that takes too long, for `ray start` takes the node of
the head along, with all that ran there, the process ends without it, before Ray ends it without a word. A head that
stands still is told, and given up only later: nothing needs it until a worker is lost. Without the node's raylet Ray
ends the driver within a second; it ends with a message before. One that stands still holds the driver up, deaf to
signals; the head gives its node up after a minute, and that ends the driver too.
"""

import asyncio
import os
import select
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

from dapo.report.console import EXIT_RESUMABLE, end_at_once
from dapo.report.watchdog import waiting

EVERY_S = 1.0  # between two tries
ANSWER_S = 2.0  # to take a connection
ASK_S = 10.0  # to answer a question; the kernel takes connections for a process that is stopped
STILL_S = 600.0  # that a head which takes connections may answer nothing
LAST_S = 50.0  # after the head was there last; Ray waits 60 s for it


class HeadLost(RuntimeError):
    """Says that Ray's head process (GCS) is gone, and with it the cluster."""


@asynccontextmanager
async def while_reachable(
    address: str,
    grace_s: float,
    answers: Callable[[], bool] = lambda: True,
    end: Callable[[str], object] = end_at_once,
) -> AsyncIterator[None]:
    """Cancels the block when nothing takes a connection at `address` (HOST:PORT) for `grace_s`, or nothing answers for
    `STILL_S`, and raises HeadLost at its end, whatever it ended with. answers: asks the head, for `ASK_S` at most. end:
    ends the process with a message where the block takes longer than Ray would give it.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    over, lost = threading.Event(), ""

    def message(seconds: float) -> str:
        return (
            f"Ray's head process (GCS) at {address} has not answered for {seconds:g} s, and its cluster is lost; start "
            "Ray again where it was not started by this run: the same command continues from the newest checkpoint"
        )

    def cancel(why: str) -> None:
        nonlocal lost
        if not over.is_set():
            lost = why
            task.cancel()

    def watch() -> None:
        missed = still = 0  # tries in a row; not seconds, for this process may have stood still itself
        with ExitStack() as told:
            while missed * EVERY_S < grace_s and still * ASK_S < STILL_S:
                if over.wait(EVERY_S):
                    return
                if not takes_connections(address):
                    missed += 1
                    continue
                missed = 0
                if answers():
                    still = 0
                    told.close()
                else:
                    still += 1
                    if still == 1:
                        told.enter_context(waiting(f"Ray's head process (GCS) at {address}, which stands still"))
        gone = missed > 0
        why = message(grace_s if gone else STILL_S)
        loop.call_soon_threadsafe(cancel, why)
        if not over.wait(LAST_S - grace_s if gone else STILL_S):
            end(f"{why}, which holds less than was trained: there was no saving it")

    # A thread, because calls of Ray that wait for its head hold the event loop up.
    threading.Thread(target=watch, name="head", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        if lost:
            raise HeadLost(lost)


def end_with_raylet(
    raylet: str,
    head: str,
    over: threading.Event,
    given_up: Callable[[], bool] = lambda: False,
    end: Callable[[str, int], object] = end_at_once,
) -> None:
    """Ends the process with a message once the node's raylet has died, until `over` is set. raylet: its socket. head:
    HOST:PORT of the head; without that one Ray leaves the driver a minute, and `while_reachable` uses it. given_up:
    asks the head whether it holds the node for dead."""
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(raylet)
            pid, _, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        process = os.pidfd_open(pid)
    except OSError:  # it is gone already, or the kernel is too old
        return

    def watch() -> None:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        while not over.is_set():
            if (dead := bool(ended.poll(EVERY_S * 1000))) or given_up():
                if not over.is_set() and takes_connections(head):
                    what = "has died, and Ray ends what it had started" if dead else "stands still, and Ray gave it up"
                    end(
                        f"Ray's process on this node (raylet) {what}; the same command continues from the newest "
                        "checkpoint",
                        EXIT_RESUMABLE,
                    )
                break
        os.close(process)

    threading.Thread(target=watch, name="raylet", daemon=True).start()


def takes_connections(address: str) -> bool:
    """Returns whether something takes a connection at HOST:PORT."""
    try:
        reach(address, ANSWER_S)
    except OSError:
        return False
    return True


def reach(address: str, limit_s: float) -> None:
    """Raises OSError where nothing takes a connection at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), limit_s):
        pass
