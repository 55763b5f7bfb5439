"""Limits restarts: a fault that keeps coming back is not solved by restarting."""

import time
from collections import deque

HOUR_S = 3600.0


class Restarts:
    """Counts restarts within the last hour, and those since one worked. most: the limit."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._recent: deque[float] = deque()
        self._in_a_row = 0

    def count(self) -> int:
        """Returns the restarts within the last hour or since one worked, whichever are more: each may take long to
        fail."""
        while self._recent and time.monotonic() - self._recent[0] > HOUR_S:
            self._recent.popleft()
        return max(len(self._recent), self._in_a_row)

    def spent(self) -> bool:
        return self.count() >= self.most

    def add(self) -> None:
        self._recent.append(time.monotonic())
        self._in_a_row += 1

    def worked(self) -> None:
        """Resets the count in a row: the restarted part has done its work since."""
        self._in_a_row = 0
