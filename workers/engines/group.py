"""Follows one group on the driver: where it is generated, which of its responses have not ended and what they have.

In: parts of responses, as engines give them. Out: whole ones; or what there is of them, where the group is not wanted.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dapo.types import Response
from workers.engines.slot import EngineSlot
from workers.engines.unfinished import Unfinished
from workers.remote import RemoteError, WorkerLost, wait

_ending: set[asyncio.Task[None]] = set()  # asyncio keeps no task from being collected
PAUSE_S = 0.002  # before an engine is asked again to end what it did not know yet


@dataclass(kw_only=True, slots=True)
class Prefix:
    """Stands for tokens that several requests begin with. engine: number of the one that has computed them last, and
    serves the next of these requests where it can; -1 before the first."""

    engine: int = -1


@dataclass(kw_only=True, slots=True)
class RunningGroup:
    """Follows a group from its start to its last response. left: responses that have not ended, by number. home: where
    it is generated, and by which start of that engine; None while it waits for one. aborted, put_down: its engine was
    asked to end it, for good or until another takes it up. prefix: what it begins with.
    """

    left: dict[int, Unfinished]
    background: bool = False
    home: tuple[EngineSlot, Any] | None = None
    aborted: bool = False
    put_down: bool = False
    prefix: Prefix = field(default_factory=Prefix)

    def runs_on(self, slot: EngineSlot) -> None:
        """Notes which engine generates it from now on."""
        self.home, self.put_down = (slot, slot.worker), False
        self.prefix.engine = slot.number

    def take(self, number: int, part: Response) -> Response | None:
        """Takes the next part of a response; returns the response if it has ended."""
        response = self.left[number].add(part)
        if response.aborted and self.put_down and not self.aborted:
            return None
        del self.left[number]
        return response

    def rest(self) -> list[tuple[int, Response]]:
        """Ends what no engine will take up; returns it with what was put down of it."""
        rest = [(number, unfinished.so_far) for number, unfinished in self.left.items()]
        self.left.clear()
        return rest


async def cut_off(groups: Mapping[str, RunningGroup], running: Callable[[], Collection[str]], timeout_s: float) -> None:
    """Lets the engines end groups, by key, until none is `running`.

    An engine knows a request only some time after it was asked for it, and ignores to end an unknown one: asked again
    until all are gone.

    Raises:
        RemoteError: they are not gone after `timeout_s` (`rollout.timeout_s`).
    """
    pause = PAUSE_S
    deadline = asyncio.get_running_loop().time() + timeout_s
    while keys := running():
        homes: dict[tuple[EngineSlot, Any], list[str]] = defaultdict(list)
        for key in keys:
            if home := groups[key].home:
                homes[home].append(key)
        await asyncio.gather(*[_abort_on(slot, worker, here, timeout_s) for (slot, worker), here in homes.items()])
        if asyncio.get_running_loop().time() > deadline:
            raise RemoteError(f"the engines did not end {sorted(keys)} within {timeout_s:g} s (`rollout.timeout_s`)")
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.2)


def give_up(key: str, slot: EngineSlot, worker: Any, timeout_s: float) -> None:
    """Asks an engine to end a group that nobody waits for any more; waits beside whatever comes next. It is asked at
    once: a group that is started again under the same name comes after it."""
    task = asyncio.ensure_future(_asked(slot, worker.abort.remote([key]), timeout_s, suppress(RemoteError)))
    _ending.add(task)
    task.add_done_callback(_ending.discard)


async def _abort_on(slot: EngineSlot, worker: Any, keys: list[str], timeout_s: float) -> None:
    await _asked(slot, worker.abort.remote(keys), timeout_s, suppress(WorkerLost))  # then they have ended


async def _asked(slot: EngineSlot, answer: Any, timeout_s: float, allowed: suppress) -> None:
    with allowed:
        await wait([answer], timeout_s, slot.member("to end groups"), "rollout.timeout_s")
