"""Counts the responses of draws in flight, for a person who waits for a batch.

In: starts and ends of responses, from `dapo.sampling.stream`. Out: how many run, how many have ended and with how many
tokens since the step began to collect, how long the longest has been running. Nothing is decided by it.
"""

import time


class Traffic:
    """Holds the counts. running: responses. ended, tokens: of those that have ended since `began` (`time.monotonic()`),
    when the step began to collect."""

    def __init__(self) -> None:
        self.running = 0
        self.open()
        self._groups: dict[str, tuple[float, int]] = {}  # when each started, and how many of its responses still run

    def open(self) -> None:
        """Counts anew what ends; what runs goes on."""
        self.began, self.ended, self.tokens = time.monotonic(), 0, 0

    def start(self, key: str, responses: int) -> None:
        """Notes that a group has gone to the engines."""
        self._groups[key] = time.monotonic(), responses
        self.running += responses

    def end(self, key: str, tokens: int) -> None:
        """Notes that a response of the group has ended."""
        since, left = self._groups[key]
        self._groups[key] = since, left - 1
        self.running -= 1
        self.ended += 1
        self.tokens += tokens

    def close(self, key: str) -> None:
        """Notes that the group has ended, also where responses of it never will."""
        _, left = self._groups.pop(key)
        self.running -= left

    def longest_s(self, now: float) -> float:
        """Returns for how many seconds the longest response has been running, its wait for a slot included; 0 where
        none is. now: `time.monotonic()`; may be called in another thread."""
        return next((now - since for since, left in list(self._groups.values()) if left), 0.0)
