"""Tells whether an engine still works: whether its process answers, and whether it computes tokens. vLLM's
`check_health` detects a process that has ended, but not one that hangs."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from dapo.workers.engines.load import EngineCounts, EngineMeter
from dapo.workers.remote import WorkerLost

ECHO_S = 0.2  # a later answer is checked at the next pulse


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """State of an engine, returned on request. requests: number it holds. silent_s: seconds that its process has owed
    an answer. idle_s: seconds since its last token; 0 if it holds no request, or a weight sync pauses it. counts: its
    work. leaves: it is told to end where it runs, outside of the cluster."""

    requests: int
    silent_s: float
    idle_s: float
    counts: EngineCounts
    leaves: bool = False


class LifeSigns:
    """Health of one engine, in its actor. meter: counts its work. lost: why it is unusable while its process lives."""

    def __init__(self) -> None:
        self.lost = ""
        self._computed = self._asked = time.monotonic()
        self._echo: asyncio.Task[None] | None = None
        self.meter = EngineMeter()

    def computed(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        self.meter.step(scheduler_stats, iteration_stats)
        if iteration_stats and (iteration_stats.num_generation_tokens or iteration_stats.num_prompt_tokens):
            self._computed = time.monotonic()

    async def pulse(self, engine: Any, requests: int) -> Pulse:
        """Returns the state of the engine, after a trivial call to its process. requests: number it holds. Raises
        WorkerLost if its process has ended, or it is unusable."""
        if engine.errored:
            raise WorkerLost("its engine process has ended")
        if self.lost:
            raise WorkerLost(self.lost)
        if self._echo is None or self._echo.done():
            self._asked = time.monotonic()
            self._echo = asyncio.create_task(self._ask(engine))
        await asyncio.wait([self._echo], timeout=ECHO_S)
        now = time.monotonic()
        if not requests:
            self._computed = now
        silent_s = 0.0 if self._echo.done() else now - self._asked
        return Pulse(requests=requests, silent_s=silent_s, idle_s=now - self._computed, counts=self.meter.read())

    async def _ask(self, engine: Any) -> None:
        if await engine.is_paused():
            self._computed = time.monotonic()


class Statistics:
    """Receives vLLM's statistics of every step; implements its `StatLoggerBase`."""

    def __init__(self, signs: LifeSigns) -> None:
        self._signs = signs

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        self._signs.computed(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None: ...
    def log(self) -> None: ...
    def record_sleep_state(self, is_awake: int, level: int) -> None: ...
