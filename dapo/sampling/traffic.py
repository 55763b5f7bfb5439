"""Counts the responses of draws in flight, for progress displays only."""

import time
from collections.abc import Callable


class Traffic:
    """running: responses. ended: since `began` (`time.monotonic()`), when the step began to collect. tokens_per_s: what
    the engines generate now, unfinished responses included: a batch of long responses may end all at once."""

    def __init__(self, tokens_per_s: Callable[[], float] = lambda: 0.0) -> None:
        self.tokens_per_s = tokens_per_s
        self.running = 0
        self.open()
        self._groups: dict[str, tuple[float, int]] = {}  # when each started, and how many of its responses still run

    def open(self) -> None:
        self.began, self.ended = time.monotonic(), 0

    def start(self, key: str, responses: int) -> None:
        self._groups[key] = time.monotonic(), responses
        self.running += responses

    def end(self, key: str) -> None:
        since, left = self._groups[key]
        self._groups[key] = since, left - 1
        self.running -= 1
        self.ended += 1

    def close(self, key: str) -> None:
        """Removes a group, including responses that will never end."""
        _, left = self._groups.pop(key)
        self.running -= left

    def longest_s(self, now: float) -> float:
        """Returns for how many seconds the longest response has been running, its wait for a slot included; 0 without
        one. now: `time.monotonic()`. May be called from another thread."""
        return next((now - since for since, left in list(self._groups.values()) if left), 0.0)
