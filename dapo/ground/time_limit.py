"""Keeps a run within `trainer.max_hours`: it stops while there is still time for the remaining work. The needed time is
estimated from how long updates and saves have taken."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

ROOM = 1.5  # factor on the longest duration so far
UNSEEN = 0.05  # share of the limit, for acts not measured yet


class TimeLimitReached(RuntimeError):
    """The run ends because of `trainer.max_hours`; it can be continued."""


class TimeLimit:
    """The time limit of one process, counted from `began` (`time.monotonic()`); max_hours 0: no limit."""

    def __init__(self, max_hours: float = 0.0, began: float = 0.0) -> None:
        self._seconds = max_hours * 3600
        self._began = began
        self._longest: dict[str, float] = {}

    @contextmanager
    def measuring(self, act: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._longest[act] = max(self._longest.get(act, 0.0), time.monotonic() - began)

    def leave_at(self, *acts: str) -> float | None:
        """Returns the time (`time.monotonic()`) after which these acts might not finish; None without limit."""
        if not self._seconds:
            return None
        need = sum(ROOM * self._longest.get(act, UNSEEN * self._seconds / ROOM) for act in acts)
        return self._began + self._seconds - need

    @asynccontextmanager
    async def leaving(self, *acts: str) -> AsyncIterator[None]:
        """Cancels the block with TimeLimitReached when these acts might not finish in time after it."""
        try:
            async with asyncio.timeout_at(self.leave_at(*acts)) as cut:
                yield
        except TimeoutError:
            if cut.expired():
                raise self.reached() from None
            raise

    def check(self, *acts: str) -> None:
        """Raises TimeLimitReached if these acts might not finish in time."""
        if self.is_over(*acts):
            raise self.reached()

    def is_over(self, *acts: str) -> bool:
        at = self.leave_at(*acts)
        return at is not None and time.monotonic() > at

    def reached(self) -> TimeLimitReached:
        return TimeLimitReached(
            f"`trainer.max_hours` ({self._seconds / 3600:g}) is nearly over; the same command continues the run"
        )
