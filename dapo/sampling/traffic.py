"""Counts the responses of draws in flight, for a person who waits for a batch.

In: starts and ends of responses, from `dapo.sampling.stream`. Out: how many run, how many have ended since the step
began to collect, how long the longest has been running, how fast tokens come. Nothing is decided by it.
"""

import time
from collections.abc import Callable


class Traffic:
    """Holds the counts. running: responses. ended: since `began` (`time.monotonic()`), when the step began to collect.
    tokens_per_s: what the engines generate now, in responses under way too; a batch of long ones may end all at once.
    """

    def __init__(self, tokens_per_s: Callable[[], float] = lambda: 0.0) -> None:
        self.tokens_per_s = tokens_per_s
        self.running = 0
        self.open()
        self._groups: dict[str, tuple[float, int]] = {}  # when each started, and how many of its responses still run

    def open(self) -> None:
        """Counts anew what ends; what runs goes on."""
        self.began, self.ended = time.monotonic(), 0

    def start(self, key: str, responses: int) -> None:
        """Notes that a group has gone to the engines."""
        self._groups[key] = time.monotonic(), responses
        self.running += responses

    def end(self, key: str) -> None:
        """Notes that a response of the group has ended."""
        since, left = self._groups[key]
        self._groups[key] = since, left - 1
        self.running -= 1
        self.ended += 1

    def close(self, key: str) -> None:
        """Notes that the group has ended, also where responses of it never will."""
        _, left = self._groups.pop(key)
        self.running -= left

    def longest_s(self, now: float) -> float:
        """Returns for how many seconds the longest response has been running, its wait for a slot included; 0 where
        none is. now: `time.monotonic()`; may be called in another thread."""
        return next((now - since for since, left in list(self._groups.values()) if left), 0.0)
