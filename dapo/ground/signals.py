"""Signal handling: the first signal (SIGINT, SIGTERM, SIGUSR1, SIGHUP) cancels the run, which saves; the second one
ends the process at once."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_S = 2.0  # a launcher and its shell may both forward the same signal


def caught() -> list[signal.Signals]:
    """Returns the signals that save; without SIGHUP if it is ignored, as under nohup."""
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (deaf and number is signal.SIGHUP)]


class Stop:
    """Cancels a task at the first signal. first: its number, None before. Nothing is caught before `install`."""

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self.first: int | None = None
        self._task = task
        self._since = 0.0

    def install(self) -> None:
        """Installs the handlers, also over those that a library (Ray) has installed since the last call."""
        loop = asyncio.get_running_loop()
        for number in caught():
            loop.add_signal_handler(number, self._signal, number)

    def _signal(self, number: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._since = number, now
            self._task.cancel()
        elif now - self._since > SAME_S:
            # No clean-up: a partial save lies next to the last complete checkpoint, and workers end with their driver.
            os._exit(128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM))


async def finish(work: Coroutine[Any, Any, T], hurry: Callable[[], None] = lambda: None) -> T:
    """Runs `work` to its end even when the run is cancelled, because a half-done update must not be saved. hurry:
    called on cancellation, so that `work` skips what is optional. Raises CancelledError then, even if the work failed:
    a cancelled run must not recover and continue."""
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
