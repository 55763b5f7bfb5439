"""Estimates how many responses the engines run at once, limited by their sequence slots and by their KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSize:
    """Size and place of one engine. sequences: that it runs at once. kv_tokens: capacity of its KV cache; 0 = unknown.
    window: longest context, in tokens. cache_bytes: measured KV cache size on each GPU; 0 = not measured. goes_on: a
    response that comes from another engine goes on with the same random numbers, so that it ends as it would have
    there. node: Ray's id."""

    sequences: int
    kv_tokens: int
    window: int
    cache_bytes: int = 0
    goes_on: bool = False
    node: str = ""


class FleetCapacity:
    """Estimates from finished responses. A response of L tokens to a prompt of P holds P + L / 2 tokens on average, for
    a time proportional to L, so the mean over running responses is weighted by L. Old responses decay, because lengths
    drift in training."""

    KEEP = 0.999  # decay of earlier observations per response

    def __init__(self, engines: Sequence[EngineSize]) -> None:
        self.engines = engines
        # Before the first response has ended, assume that responses fill the window.
        window = max((engine.window for engine in engines), default=0)
        self._time, self._area = float(window), window * window / 2
        self._count = self._seconds = 0.0

    def observe(self, prompt: int, response: int, seconds: float = 0.0) -> None:
        """Records the lengths in tokens of a finished response, and its seconds on its engine."""
        self._time = self.KEEP * self._time + response
        self._area = self.KEEP * self._area + response * (prompt + response / 2)
        self._count, self._seconds = self.KEEP * self._count + 1, self.KEEP * self._seconds + seconds

    @property
    def engines(self) -> tuple[EngineSize, ...]:
        return self._engines

    @engines.setter
    def engines(self, engines: Sequence[EngineSize]) -> None:
        self._engines = tuple(engines)
        self._sequences, self._kv_tokens = (
            np.array([getattr(engine, name) for engine in engines], dtype=np.int64)
            for name in ("sequences", "kv_tokens")
        )

    @property
    def response_s(self) -> float:
        """Mean seconds of a response on its engine; 0 before the first has ended."""
        return self._seconds / self._count if self._count else 0.0

    @property
    def responses(self) -> int:
        """Number of responses that all engines together run at once; at least one per engine."""
        if not self._area:
            return int(self._sequences.sum())
        fits = np.maximum(self._kv_tokens * self._time / self._area, 1.0).astype(np.int64)
        return int(np.where(self._kv_tokens > 0, np.minimum(fits, self._sequences), self._sequences).sum())
