"""Makes calls of Ray's that may not come back: with a deadline, and so that a signal ends the wait.

In: a call. Out: its end, or an error. Ray waits in C++, where the main thread handles no signal: the call has a thread
of its own. Where that is left behind in it, the process is to end without the clean-up that would wait for Ray.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from dapo.faults.signals import SIGNALS
from dapo.report.console import vanish_at_exit

LOOK_S = 0.2  # the kernel may give a signal to another thread, and nothing wakes this one then

left_behind = threading.Event()  # a call never came back


class Late(TimeoutError):
    """Says that a call has not come back in time."""


def within(limit_s: float, call: Callable[[], object], what: str, until: threading.Event | None = None) -> None:
    """Makes the call, and raises what it raises; Late after `limit_s`; KeyboardInterrupt after Ctrl-C and
    CancelledError after another signal that this process catches.

    what: names the call. until: what the call has started is needed so long; the kernel ends Ray's processes with the
    thread that has started them.
    """
    done, raised = threading.Event(), []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()
        if until is not None and not raised:
            until.wait()

    threading.Thread(target=run, name=what, daemon=True).start()
    ends = time.monotonic() + limit_s
    try:
        with _interrupting():
            while not done.wait(LOOK_S):
                if time.monotonic() >= ends:
                    raise Late(f"{what} has taken more than {limit_s:g} s")
    finally:
        if not done.is_set():
            left_behind.set()
            vanish_at_exit()
    if raised:
        raise raised[0]


@contextmanager
def _interrupting() -> Iterator[None]:
    """Has signals raise in the block, which holds an event loop up: the loop's own handlers hear of them after it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else asyncio.CancelledError

    here = threading.current_thread() is threading.main_thread()
    before = {number: handler for number in SIGNALS if here and callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
