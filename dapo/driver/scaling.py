"""Lets engines join and leave a run while it goes on, as `dapo scale` asks for (`dapo.state.fleet_size`)."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from dapo.state.fleet_size import wanted_engines

POLL_S = 1.0


class Scaling:
    """The engines of one run. Composed in `dapo.driver.fleet`."""

    def __init__(
        self,
        engines: Callable[[], tuple[int, ...]],
        join: Callable[[], Awaitable[None]],
        leave: Callable[[int], Awaitable[None]],
        warn: Callable[[str], None],
    ) -> None:
        """engines: returns the numbers of all but those that leave. join: starts one more, once there is a place."""
        self._engines, self._join, self._leave, self._warn = engines, join, leave, warn
        self._joining: set[asyncio.Task[None]] = set()

    async def follow(self, directory: Path) -> None:
        """Makes the number of engines what is asked for, until it is cancelled. Engines leave one by one."""
        while True:
            await asyncio.sleep(POLL_S)
            there, wanted = self._engines(), wanted_engines(directory)
            missing = 0 if wanted is None else wanted - len(there) - len(self._joining)
            for _ in range(missing):
                task = asyncio.create_task(self._one_more())
                self._joining.add(task)
                task.add_done_callback(self._joining.discard)
            if missing < 0 and not self._joining:
                self._warn(f"engine {there[-1]} leaves, because `dapo scale` asks for {wanted}")
                with suppress(RuntimeError):  # it is lost, and was to leave
                    await self._leave(there[-1])

    async def _one_more(self) -> None:
        with suppress(RuntimeError):  # the run ends, and no place was found
            await self._join()
