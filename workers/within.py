"""Makes Ray calls that may hang, with a deadline and interruptible by signals. Ray waits in C++, where the main thread
handles no signal, so the call runs in its own thread. If that thread is left behind, the process must exit without the
clean-up that would wait for Ray."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from dapo.ground.console import vanish_at_exit
from dapo.ground.signals import SIGNALS

LOOK_S = 0.2  # polling interval: the kernel may deliver a signal to another thread, which does not wake this one

left_behind = threading.Event()  # a call never came back


class Late(TimeoutError):
    """A call has not returned in time."""


def within(limit_s: float, call: Callable[[], object], what: str, until: threading.Event | None = None) -> None:
    """Makes the call and raises what it raises; Late after `limit_s`; KeyboardInterrupt after Ctrl-C and CancelledError
    after another signal that this process catches. what: names the call. until: keeps the thread alive until this is
    set, because the kernel ends Ray's processes with the thread that started them."""
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
    """Makes signals raise in the block, which blocks the event loop; the loop's own handlers run only after it."""

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
