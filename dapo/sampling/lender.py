"""Lends the actors' GPUs to engines while the actors wait for a batch that is far from full (`trainer.colocate=lend`).

    collect ─▶ consider ─ pays? ─▶ wake, take the weights ─▶ serve ─▶ batch full ─▶ leave: abort, sleep ─▶ update

The cost of a switch is measured. Until it is known, the engines wake as soon as anything waits, so that the first steps
measure it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from dapo.ground.console import warn
from dapo.sampling.lending import Lending, Slots


class Lender:
    """Wakes the engines at most once per batch."""

    def __init__(
        self,
        slots: Callable[[], Slots],
        wake: Callable[[], Awaitable[float | None]],
        sleep: Callable[[], Awaitable[None]],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """wake: see `workers.weight_sync.WeightSync.lend`. sleep: takes the GPUs back. now: a clock in seconds."""
        self._slots, self._wake, self._sleep, self._now = slots, wake, sleep, now
        self._wake_s: float | None = None
        self._sleep_s: float | None = None
        self._waking: asyncio.Task[None] | None = None
        self._since: float | None = None  # when the engines began to serve
        self._wakes, self._awake_s, self._gain_s = 0, 0.0, 0.0

    def consider(self, missing: int, on_awake: Callable[[], None]) -> None:
        """Begins to wake the engines if it pays. missing: responses of the batch that have not started."""
        if self._waking is not None:
            return
        slots = self._slots()
        if missing + slots.queued and self._pays(slots, missing + slots.queued):
            self._waking = asyncio.create_task(self._lend(on_awake))

    def _pays(self, slots: Slots, waiting: int) -> bool:
        if self._wake_s is None or self._sleep_s is None:
            return True
        lending = Lending(own=slots.own, lent=slots.lent, wake_s=self._wake_s, sleep_s=self._sleep_s)
        gain_s = lending.gain_s(waiting, slots.response_s)
        self._gain_s += max(0.0, gain_s)
        return gain_s > 0

    async def _lend(self, on_awake: Callable[[], None]) -> None:
        self._wakes += 1
        try:
            seconds = await self._wake()
        except RuntimeError as error:  # the run continues; lost actors are noticed elsewhere
            warn(f"engines could not use the actors' GPUs: {error}")
            return
        if seconds is not None:
            self._wake_s, self._since = seconds, self._now()
            on_awake()

    async def leave(self) -> None:
        """Returns the GPUs to the actors: waits until the engines on them sleep."""
        if self._waking is None:
            return
        await self._settled(self._waking)
        began = self._now()
        await self._sleep()
        self._sleep_s = self._now() - began
        self._waking = None

    async def close(self) -> None:
        """Waits for a wake under way, so that no engine is left between two states."""
        if self._waking is not None:
            await self._settled(self._waking)
            self._waking = None

    async def _settled(self, waking: asyncio.Task[None]) -> None:
        await asyncio.wait([waking])  # has its own deadline
        if self._since is not None:
            self._awake_s += self._now() - self._since
            self._since = None

    def lap(self) -> dict[str, float]:
        found = {
            "perf/lending/wakes": float(self._wakes),
            "perf/lending/awake_s": self._awake_s,
            "perf/lending/forecast_s": self._gain_s,
        }
        self._wakes, self._awake_s, self._gain_s = 0, 0.0, 0.0
        costs = {"perf/lending/wake_s": self._wake_s, "perf/lending/sleep_s": self._sleep_s}
        return found | {name: seconds for name, seconds in costs.items() if seconds is not None}
