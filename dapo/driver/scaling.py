"""Lets engines join and leave a run while it goes on: as `dapo scale` asks for, and off nodes that are told to go."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo.state.fleet_size import wanted_engines

POLL_S = 1.0
MARGIN_S = 10.0  # of a node's last seconds, for the hand-over


class Scaling:
    """The engines of one run. Composed in `dapo.driver.fleet`."""

    def __init__(
        self,
        engines: Callable[[], Mapping[int, str]],
        join: Callable[[], Awaitable[None]],
        leave: Callable[[int, float], Awaitable[None]],
        warn: Callable[[str], None],
        *,
        wanted: int,
        leave_s: float,
        going: Callable[[], Mapping[str, float]] = dict,
        on_going: Callable[[str], None] = lambda node: None,
    ) -> None:
        """engines: returns number and node of all but those that leave. join: starts one more, once there is a place.
        leave(number, seconds): ends one, which has these seconds to finish. wanted: number of engines unless
        `dapo scale` says another. leave_s: the most seconds to finish. going: returns the nodes that were told to go,
        with the seconds left to each. on_going: called once for each of them."""
        self._engines, self._join, self._leave, self._warn = engines, join, leave, warn
        self._wanted, self._leave_s, self._going, self._on_going = wanted, leave_s, going, on_going
        self._told: set[str] = set()
        self._joining = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def follow(self, directory: Path) -> None:
        """Makes the number of engines what is wanted, until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self._empty_nodes()
            there, asked = self._engines(), wanted_engines(directory)
            wanted = self._wanted if asked is None else asked
            missing = wanted - len(there) - self._joining
            for _ in range(missing):
                self._joining += 1
                self._start(self._one_more())
            if missing < 0 and not self._joining:
                last = max(there)
                self._warn(f"engine {last} leaves: the number wanted is {wanted}")
                self._start(self._off(last, self._leave_s))

    def _empty_nodes(self) -> None:
        """Lets the engines leave that are on nodes which go."""
        going = self._going()
        for node in going.keys() - self._told:
            self._told.add(node)
            self._on_going(node)
        for number, node in self._engines().items():
            if node in going:
                self._warn(f"engine {number} leaves: its node goes in {going[node]:.0f} s")
                self._start(self._off(number, min(self._leave_s, max(0.0, going[node] - MARGIN_S))))

    async def _off(self, number: int, seconds: float) -> None:
        with suppress(RuntimeError):  # it is lost, and was to leave
            await self._leave(number, seconds)

    async def _one_more(self) -> None:
        try:
            with suppress(RuntimeError):  # the run ends, and no place was found; or too many did not start
                await self._join()
        finally:
            self._joining -= 1

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
