"""Tells a function's own time from that in which it waits for a place at what all calls share, such as the interpreter.

In: `with queued():` around such a wait, wherever the function's call leads to. Out: the seconds that count against
`rollout.function.timeout_s`: else a batch whose calls come together would fail for want of processes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Stopwatch:
    """Counts the seconds of one call of a function since `restart`, but for those in which it was queued."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Starts. now: seconds, of any origin."""
        self._now = now
        self._queued = 0  # waits that are open
        self.restart()

    def restart(self) -> None:
        """Counts from 0."""
        self._spent, self._since = 0.0, self._now()

    def spent(self) -> float:
        """Returns the seconds so far."""
        return self._spent + (0.0 if self._queued else self._now() - self._since)

    def pause(self) -> None:
        """Notes that a wait begins."""
        self._spent = self.spent()
        self._queued += 1

    def go_on(self) -> None:
        """Notes that it has ended."""
        self._spent, self._queued = self.spent(), self._queued - 1
        self._since = self._now()


watch: ContextVar[Stopwatch | None] = ContextVar("watch", default=None)  # of the call that runs


@contextmanager
def queued() -> Iterator[None]:
    """Lets the seconds of the block not count."""
    own = watch.get()
    if own is None:
        yield
        return
    own.pause()
    try:
        yield
    finally:
        own.go_on()
