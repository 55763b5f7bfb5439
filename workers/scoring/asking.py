"""Asks again where it is the servers of async reward functions that failed, and not the response.

In: a response to be scored, and who scores it. Out: its verdict, once a judge of the run's own has been there to give
it, and an endpoint that takes no connection, or asks to be left alone, has come back, or has been away for too long.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from dapo.report.watchdog import waiting
from dapo.rewards.calling.fork_server import Item
from workers.remote import RemoteError
from workers.scoring.beside import Judges
from workers.scoring.verdict import Verdict

MOVES = 3  # of a response to judges that were started again since it asked them: it may be what ends them
PAUSE_S, MAX_PAUSE_S = 5.0, 60.0  # between tries of a response whose server takes no connection: they double

Score = Callable[[Item, int], Awaitable[tuple[Verdict, int]]]


class Asking:
    """Holds the run's own judges, where it has some. patience_s: `reward.remote.patience_s`."""

    def __init__(self, judges: Judges | None, patience_s: float, warn: Callable[[str], None]) -> None:
        self._judges, self._patience_s, self._warn = judges, patience_s, warn
        self._waiting = 0

    async def verdict(self, item: Item, avoid: int = -1, *, score: Score) -> tuple[Verdict, int]:
        """Returns the verdict, and the number of the worker that gave it. avoid: the worker that shall not.

        Raises:
            RemoteError: no judge of the run's own is left.
        """
        verdict, worker = await self._judged(item, avoid, score)
        if verdict.score.failure != "away" or not self._patience_s:
            return verdict, worker
        until, pause = time.monotonic() + self._patience_s, PAUSE_S
        if not self._waiting:
            self._warn(
                f"reward: {verdict.detail}; responses wait for a server to be there, {self._patience_s:g} s at most "
                "(`reward.remote.patience_s`)"
            )
        self._waiting += 1
        try:
            with waiting("a server that reward functions ask", each="responses"):
                while verdict.score.failure == "away" and (left := until - time.monotonic()) > 0:
                    await asyncio.sleep(min(max(pause, verdict.after_s), left))
                    pause = min(2 * pause, MAX_PAUSE_S)
                    verdict, worker = await self._judged(item, avoid, score)
        finally:
            self._waiting -= 1
        return verdict, worker

    async def _judged(self, item: Item, avoid: int, score: Score) -> tuple[Verdict, int]:
        """Asks the run's own judges again that were started again since: they had lost the response, or stood still."""
        for moves in range(MOVES + 1):
            servers = await self._servers()
            verdict, worker = await score(replace(item, servers=servers), avoid)
            if self._judges is None or verdict.score.failure not in ("remote", "away") or moves == MOVES:
                break
            await self._judges.heard()
            if await self._servers() == servers:
                break
        return verdict, worker

    async def _servers(self) -> list[dict[str, str]]:
        """Returns the run's own judges, once one serves. Raises RemoteError where none is left."""
        if self._judges is None:
            return []
        found = list(await self._judges.there())
        if self._judges.failure:
            raise RemoteError(self._judges.failure)
        return found
