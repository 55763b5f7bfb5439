"""Lets signals end a run in order: the first one saves, the second one ends the process at once.

In: SIGINT (Ctrl-C), SIGTERM, SIGUSR1, SIGHUP (a terminal that closes). Out: the cancelled task of the run, or the end
of the process.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_S = 2.0  # a launcher and the shell around it forward one signal both


def caught() -> list[signal.Signals]:
    """Returns the signals that save: SIGHUP not where it is ignored, as under nohup."""
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (deaf and number is signal.SIGHUP)]


class Stop:
    """Cancels a task at the first signal. first: which one that was, None while none came."""

    def __init__(self, task: "asyncio.Task[object]") -> None:
        """Takes the task to cancel. Nothing is caught before `install`."""
        self.first: int | None = None
        self._task = task
        self._since = 0.0

    def install(self) -> None:
        """Catches the signals from now on, also those that a library (Ray) has caught since the last call."""
        loop = asyncio.get_running_loop()
        for number in caught():
            loop.add_signal_handler(number, self._signal, number)

    def _signal(self, number: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._since = number, now
            self._task.cancel()
        elif now - self._since > SAME_S:
            # No clean-up: what is being saved stays beside the last whole checkpoint; workers end with their driver.
            os._exit(128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM))


async def finish(work: Coroutine[Any, Any, T], hurry: Callable[[], None] = lambda: None) -> T:
    """Runs `work` to its end even when the run is being cancelled: a half-done update is no state to save.

    hurry: called then, so that `work` leaves out what it need not do.

    Raises CancelledError then, also where the work failed: its failure is no reason to recover and go on.
    """
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
            hurry()
    if cancelled:
        raise asyncio.CancelledError from task.exception()
    return task.result()
