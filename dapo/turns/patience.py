"""Separates a function's own time from the time it waits for shared resources, such as the interpreter. Code wraps such
waits in `with queued():`. Only the remaining seconds count against `rollout.function.timeout_s`; otherwise a batch of
simultaneous calls would fail for lack of processes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Stopwatch:
    """Counts the seconds of one function call since `restart`, except while it is queued."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._queued = 0  # number of waits in progress
        self.restart()

    def restart(self) -> None:
        self._spent, self._since = 0.0, self._now()

    def spent(self) -> float:
        return self._spent + (0.0 if self._queued else self._now() - self._since)

    def pause(self) -> None:
        self._spent = self.spent()
        self._queued += 1

    def go_on(self) -> None:
        self._spent, self._queued = self.spent(), self._queued - 1
        self._since = self._now()


watch: ContextVar[Stopwatch | None] = ContextVar("watch", default=None)  # of the current call


@contextmanager
def queued() -> Iterator[None]:
    own = watch.get()
    if own is None:
        yield
        return
    own.pause()
    try:
        yield
    finally:
        own.go_on()
