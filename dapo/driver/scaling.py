"""Lets engines join and leave a run while it goes on, as `dapo scale` asks for (`dapo.state.fleet_size`)."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dapo.config.schema import Config
from dapo.state.fleet_size import wanted_engines
from dapo.workers.placement import Placement
from dapo.workers.remote import RemoteError
from dapo.workers.rollout import RolloutPool

POLL_S = 1.0


class Scaling:
    """The engines of one run, which have GPUs of their own (`trainer.colocate=none`)."""

    def __init__(self, engines: RolloutPool, placement: Placement, cfg: Config, warn: Callable[[str], None]) -> None:
        self._engines, self._placement, self._warn = engines, placement, warn
        self._notice_s = cfg.rollout.leave_s
        self._hands_over = cfg.filter_groups.max_staleness > 0  # at 0 the same tokens have to come
        self._joining: set[asyncio.Task[None]] = set()

    async def follow(self, directory: Path) -> None:
        """Makes the number of engines what is asked for, until it is cancelled. Engines leave one by one."""
        while True:
            await asyncio.sleep(POLL_S)
            there, wanted = self._engines.engines, wanted_engines(directory)
            missing = 0 if wanted is None else wanted - len(there) - len(self._joining)
            for _ in range(missing):
                task = asyncio.create_task(self._join())
                self._joining.add(task)
                task.add_done_callback(self._joining.discard)
            if missing < 0 and not self._joining:
                self._warn(f"engine {there[-1]} leaves, because `dapo scale` asks for {wanted}")
                with suppress(RemoteError):  # it is lost, and was to leave
                    await self._engines.leave(there[-1], self._notice_s, hand_over=self._hands_over)

    async def _join(self) -> None:
        with suppress(RuntimeError):  # the run ends
            options, own = await asyncio.to_thread(self._placement.another)
            own(self._engines.join(options))
