"""Bounds how often something is started again: a fault that comes back is no fault that a restart helps."""

import time
from collections import deque

HOUR_S = 3600.0


class Restarts:
    """Counts restarts within the last hour, and those that failed since one worked. most: how many there may be."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._recent: deque[float] = deque()
        self._in_a_row = 0

    def count(self) -> int:
        """Returns how many there were within the last hour, or since one worked: each may take long to fail."""
        while self._recent and time.monotonic() - self._recent[0] > HOUR_S:
            self._recent.popleft()
        return max(len(self._recent), self._in_a_row)

    def spent(self) -> bool:
        """Returns whether there may be no further one now."""
        return self.count() >= self.most

    def add(self) -> None:
        """Notes one that begins."""
        self._recent.append(time.monotonic())
        self._in_a_row += 1

    def worked(self) -> None:
        """Notes that the last one worked: what it was for has been done since."""
        self._in_a_row = 0
