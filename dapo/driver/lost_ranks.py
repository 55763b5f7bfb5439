"""Detects the loss of idle actor ranks, while engines generate for minutes or hours."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from dapo.pools import ActorPool, ActorsLost

T = TypeVar("T")


async def unless_lost(work: Coroutine[Any, Any, T], actors: ActorPool) -> T:
    """Returns what `work` returns. Raises ActorsLost, and cancels `work`, when the ranks are lost before its end."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(actors.until_lost())
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ActorsLost(watch.result())
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.wait([task, watch])  # the cancelled work must end before anything else begins
