"""Retries scoring when the server of an async reward function failed, not the response: when a self-hosted judge was
restarted, or an endpoint refuses connections or asks for a pause, up to `reward.remote.patience_s`."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from dapo.ground.watchdog import waiting
from dapo.rewards.calling.fork_server import Item
from dapo.types import Prompt, Response
from dapo.workers.remote import RemoteError
from dapo.workers.scoring.fleet import Fleet
from dapo.workers.scoring.verdict import Verdict


class RewardModel(Protocol):
    """A model that scores, such as `workers.reward_model.RewardModelPool`; NaN if it cannot. fleet: its workers."""

    fleet: Fleet

    async def start(self, timeout_s: float) -> None: ...
    async def score(self, prompt: Prompt, response: Response) -> float: ...
    def stop(self) -> None: ...


class Judges(Protocol):
    """Self-hosted judges that async functions call: `workers.judge.JudgePool`. failure: why no judge is left, or "".
    servers: the `url`, `key` and start number (`start`) of each serving judge. there: the same, but waits for one.
    heard: waits until each serving judge has answered a probe or is lost."""

    @property
    def failure(self) -> str: ...
    @property
    def restarts(self) -> int: ...
    async def start(self, timeout_s: float) -> None: ...
    def servers(self) -> Sequence[dict[str, str]]: ...
    async def there(self) -> Sequence[dict[str, str]]: ...
    async def heard(self) -> None: ...
    def stop(self) -> None: ...


MOVES = 3  # retries of a response on restarted judges: the response itself may crash them
PAUSE_S, MAX_PAUSE_S = 5.0, 60.0  # between retries of a response whose server is unreachable; doubles

Score = Callable[[Item, int], Awaitable[tuple[Verdict, int]]]


class Asking:
    """judges: the self-hosted judges, if any. patience_s: `reward.remote.patience_s`."""

    def __init__(self, judges: Judges | None, patience_s: float, warn: Callable[[str], None]) -> None:
        self._judges, self._patience_s, self._warn = judges, patience_s, warn
        self._waiting = 0

    async def verdict(self, item: Item, avoid: int = -1, *, score: Score) -> tuple[Verdict, int]:
        """Returns the verdict and the number of the worker that gave it. avoid: a worker that must not score it. Raises
        RemoteError if no self-hosted judge is left."""
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
        """Scores again if self-hosted judges were restarted meanwhile: they may have lost the request, or hung."""
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
        """Waits until a self-hosted judge serves and returns all that do. Raises RemoteError if none is left."""
        if self._judges is None:
            return []
        found = list(await self._judges.there())
        if self._judges.failure:
            raise RemoteError(self._judges.failure)
        return found
