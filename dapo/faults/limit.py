"""Keeps a run within a wall-clock limit: it is left while there is time for what must still be done.

In: `trainer.max_hours`, and how long updates and saves have taken. Out: the moment to leave, or TimeLimitReached.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

ROOM = 1.5  # times the longest that was seen
UNSEEN = 0.05  # of the limit, for what was not seen yet


class TimeLimitReached(RuntimeError):
    """Says that the run ends because of `trainer.max_hours`; it can be continued."""


class TimeLimit:
    """Holds the limit of one process, from `began` (`time.monotonic()`) on; max_hours 0 = none."""

    def __init__(self, max_hours: float = 0.0, began: float = 0.0) -> None:
        self._seconds = max_hours * 3600
        self._began = began
        self._longest: dict[str, float] = {}

    @contextmanager
    def measuring(self, act: str) -> Iterator[None]:
        """Notes how long the block takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._longest[act] = max(self._longest.get(act, 0.0), time.monotonic() - began)

    def leave_at(self, *acts: str) -> float | None:
        """Returns the moment (`time.monotonic()`) after which these acts might not end in time; None without limit."""
        if not self._seconds:
            return None
        need = sum(ROOM * self._longest.get(act, UNSEEN * self._seconds / ROOM) for act in acts)
        return self._began + self._seconds - need

    @asynccontextmanager
    async def leaving(self, *acts: str) -> AsyncIterator[None]:
        """Cuts the block short, with TimeLimitReached, where these acts might not end in time after it."""
        try:
            async with asyncio.timeout_at(self.leave_at(*acts)) as cut:
                yield
        except TimeoutError:
            if cut.expired():
                raise self.reached() from None
            raise

    def check(self, *acts: str) -> None:
        """Raises TimeLimitReached where these acts might not end in time."""
        if self.is_over(*acts):
            raise self.reached()

    def is_over(self, *acts: str) -> bool:
        """Returns whether these acts might not end in time."""
        at = self.leave_at(*acts)
        return at is not None and time.monotonic() > at

    def reached(self) -> TimeLimitReached:
        """Returns the error that ends the run."""
        return TimeLimitReached(
            f"`trainer.max_hours` ({self._seconds / 3600:g}) is nearly over; the same command continues the run"
        )
