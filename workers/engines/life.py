"""Tells whether an engine still works: does its process answer, and does it compute tokens?

In: a running `AsyncLLM` and vLLM's statistics of each of its steps. Out: a `Pulse`, on request, which also brings what
the engine did (`workers.engines.load`). vLLM's `check_health` finds a process that has ended, and not one that stands
still.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from workers.engines.load import EngineCounts, EngineMeter
from workers.remote import WorkerLost

ECHO_S = 0.2  # an answer that takes longer is looked at with the next pulse


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """Says how an engine does. requests: that it holds. silent_s: for how long its process has owed an answer. idle_s:
    since its last token; 0 where it holds no request, or a weight sync holds them all up. counts: of what it did."""

    requests: int
    silent_s: float
    idle_s: float
    counts: EngineCounts


class LifeSigns:
    """Follows one engine, in its actor. meter: counts what it does. lost: why it is of no use, though its process
    lives."""

    def __init__(self) -> None:
        self.lost = ""
        self._computed = self._asked = time.monotonic()
        self._echo: asyncio.Task[None] | None = None
        self.meter = EngineMeter()

    def computed(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Notes a step of the engine, by vLLM's statistics of it."""
        self.meter.step(scheduler_stats, iteration_stats)
        if iteration_stats and (iteration_stats.num_generation_tokens or iteration_stats.num_prompt_tokens):
            self._computed = time.monotonic()

    async def pulse(self, engine: Any, requests: int) -> Pulse:
        """Returns how the engine does, which holds that many requests. Its process is asked something trivial.

        Raises:
            WorkerLost: the process has ended, or the engine is lost otherwise.
        """
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
    """Takes vLLM's statistics of every step; fulfils its `StatLoggerBase`."""

    def __init__(self, signs: LifeSigns) -> None:
        """Hands each step on to `signs`."""
        self._signs = signs

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        self._signs.computed(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None: ...
    def log(self) -> None: ...
    def record_sleep_state(self, is_awake: int, level: int) -> None: ...
