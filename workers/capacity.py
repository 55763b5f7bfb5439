"""Estimates how many responses the engines run at once: bounded by their sequences and by their KV cache.

In: what each engine said at its start, and the lengths of the responses that end. Out: a number of responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSize:
    """Holds the size of one engine. sequences: that it runs at once. kv_tokens: that its cache holds; 0 = not known.
    window: longest context, in tokens. cache_bytes: that vLLM measured room for on each of its GPUs; 0 = it did not."""

    sequences: int
    kv_tokens: int
    window: int
    cache_bytes: int = 0


class FleetCapacity:
    """Estimates with responses that grow from P to P + L tokens: each holds P + L / 2 of them in the mean, for a time
    that goes with L. The mean over running responses is therefore weighted by L; older responses fade, because lengths
    drift in training.
    """

    KEEP = 0.999  # weight of what was observed before, at each response

    def __init__(self, engines: Sequence[EngineSize]) -> None:
        self._engines = tuple(engines)
        # Before the first response ended: all of them fill the window.
        window = max((engine.window for engine in engines), default=0)
        self._time, self._area = float(window), window * window / 2
        self._count = self._seconds = 0.0

    def observe(self, prompt: int, response: int, seconds: float = 0.0) -> None:
        """Records the lengths, in tokens, of a response that ended, and the seconds that its engine had it."""
        self._time = self.KEEP * self._time + response
        self._area = self.KEEP * self._area + response * (prompt + response / 2)
        self._count, self._seconds = self.KEEP * self._count + 1, self.KEEP * self._seconds + seconds

    @property
    def response_s(self) -> float:
        """Returns the mean seconds that an engine has a response; 0 before the first has ended."""
        return self._seconds / self._count if self._count else 0.0

    @property
    def responses(self) -> int:
        """Counts the responses that all engines together run at once; at least one each."""
        return sum(self._of(engine) for engine in self._engines)

    def _of(self, engine: EngineSize) -> int:
        if not engine.kv_tokens or not self._area:
            return engine.sequences
        return max(1, min(engine.sequences, int(engine.kv_tokens * self._time / self._area)))
