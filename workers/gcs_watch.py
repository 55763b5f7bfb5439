"""Ends a run in order when Ray's head process (GCS) is lost. Ray alone would kill every process of the run a minute
later.

The run is cancelled and saves what was trained, as after a signal (live processes reach each other without the head);
then `HeadLost` is raised. If this takes too long (`ray start` takes the head's whole node down with it), the process
ends itself with a message before Ray ends it without one. A head that accepts connections but does not answer is
reported at once, but treated as lost only after `STILL_S`: nothing needs it until a worker is lost.
When the node's raylet dies, Ray ends the driver within a second; this process ends first, with a message. A raylet that
hangs blocks the driver, which then ignores signals; the head declares its node dead after a minute, and that ends the
driver too.
"""

import asyncio
import os
import select
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

from dapo.ground.console import EXIT_RESUMABLE, end_at_once
from dapo.ground.watchdog import waiting

EVERY_S = 1.0  # between two tries
ANSWER_S = 2.0  # to accept a connection
ASK_S = 10.0  # to answer a query; the kernel accepts connections for a stopped process
STILL_S = 600.0  # without an answer from a head that accepts connections
LAST_S = 50.0  # after the head was last reachable; Ray waits 60 s for it


class HeadLost(RuntimeError):
    """Ray's head process (GCS) is lost, and with it the cluster."""


@asynccontextmanager
async def while_reachable(
    address: str,
    grace_s: float,
    answers: Callable[[], bool] = lambda: True,
    end: Callable[[str], object] = end_at_once,
) -> AsyncIterator[None]:
    """Cancels the block when the head is lost, and raises HeadLost at its end, whatever the block raised. The head is
    lost when nothing accepts a connection at `address` (HOST:PORT) for `grace_s`, or it answers nothing for `STILL_S`.
    answers: queries the head, for at most `ASK_S`. end: ends the process with a message if the block takes longer than
    Ray would leave it."""
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
        missed = still = 0  # consecutive tries, not seconds: this process may have been paused itself
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

    # A thread, because Ray calls that wait for the head block the event loop.
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
    HOST:PORT of the head; if the head is lost too, Ray leaves the driver a minute, and `while_reachable` handles it.
    given_up: whether the head has declared the node dead."""
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(raylet)
            pid, _, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        process = os.pidfd_open(pid)
    except OSError:  # it has ended already, or the kernel is too old
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
    try:
        reach(address, ANSWER_S)
    except OSError:
        return False
    return True


def reach(address: str, limit_s: float) -> None:
    """Raises OSError if nothing accepts a connection at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), limit_s):
        pass
