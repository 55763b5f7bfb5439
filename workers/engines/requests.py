"""Driver-side state of running groups: where each is generated, and its unfinished responses, which any engine can
resume.

    engine A ─ tokens, log-probabilities, versions ─▶ driver ─ prompt + tokens as one prompt ─▶ engine B

The parts of a response are joined into one `Response`. Every token occurs once, with the log-probability and version of
the policy that sampled it. Responses of an unwanted group are returned incomplete.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dapo.types import Experts, Response, VersionSpan, joined_support
from dapo.workers.engines.slot import EngineSlot
from dapo.workers.engines.worker import Start
from dapo.workers.remote import RemoteError, WorkerLost, wait

NOTHING = Response(
    token_ids=np.zeros(0, dtype=np.int32),
    rollout_logprobs=np.zeros(0, dtype=np.float32),
    text="",
    finish_reason="abort",
    policy_versions=(),
    engine=-1,
    seconds=0.0,
)


@dataclass(kw_only=True, slots=True)
class Unfinished:
    """A response that has not ended. seed: of its first token. so_far: its joined parts."""

    seed: int
    so_far: Response = NOTHING

    def start(self) -> Start:
        return Start(token_ids=self.so_far.token_ids, seed=self.seed)

    def add(self, part: Response) -> Response:
        self.so_far = joined(self.so_far, part)
        return self.so_far


def joined(first: Response, then: Response) -> Response:
    """Joins two parts of a response. `text`, finish reason and engine are those of the second part, whose `text` must
    cover both. `seconds` is the sum of both, without the time between them."""
    length = len(first.token_ids)
    if not length:
        return replace(then, seconds=first.seconds + then.seconds)
    later = [replace(span, start=span.start + length, end=span.end + length) for span in then.policy_versions]
    return replace(
        then,
        token_ids=np.concatenate([first.token_ids, then.token_ids]),
        rollout_logprobs=np.concatenate([first.rollout_logprobs, then.rollout_logprobs]),
        policy_versions=tuple(_merged([*first.policy_versions, *later])),
        support=joined_support([(first.support, length), (then.support, len(then.token_ids))]),
        experts=_all_rows(first.experts, then.experts),
        seconds=first.seconds + then.seconds,
    )


def _all_rows(first: Experts | None, then: Experts | None) -> Experts | None:
    return first if then is None else then if first is None else np.concatenate([first, then])


def _merged(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    found: list[VersionSpan] = []
    for span in spans:
        if found and found[-1].version == span.version:
            span = replace(span, start=found.pop().start)
        found.append(span)
    return found


_ending: set[asyncio.Task[None]] = set()  # asyncio holds only weak references to tasks
PAUSE_S = 0.002  # before the first repeated abort


@dataclass(kw_only=True, slots=True)
class Prefix:
    """A token prefix shared by several requests. engine: number of the engine that computed it last, preferred for the
    next of these requests; -1 before the first."""

    engine: int = -1


@dataclass(kw_only=True, slots=True)
class RunningGroup:
    """A group from its start to its last response. left: unfinished responses, by number. home: the engine slot that
    generates it, with the actor it started on; None while it waits for an engine. aborted: it was aborted for good.
    put_down: it was aborted on its engine, to be resumed on any engine. prefix: its token prefix."""

    left: dict[int, Unfinished]
    background: bool = False
    home: tuple[EngineSlot, Any] | None = None
    aborted: bool = False
    put_down: bool = False
    prefix: Prefix = field(default_factory=Prefix)

    def runs_on(self, slot: EngineSlot) -> None:
        self.home, self.put_down = (slot, slot.worker), False
        self.prefix.engine = slot.number

    def take(self, number: int, part: Response) -> Response | None:
        """Adds the next part of a response; returns the response if it has ended."""
        response = self.left[number].add(part)
        if response.aborted and self.put_down and not self.aborted:
            return None
        del self.left[number]
        return response

    def rest(self) -> list[tuple[int, Response]]:
        """Removes and returns the responses that no engine will resume, with the tokens they have so far."""
        rest = [(number, unfinished.so_far) for number, unfinished in self.left.items()]
        self.left.clear()
        return rest


async def abort_all(
    groups: Mapping[str, RunningGroup], running: Callable[[], Collection[str]], timeout_s: float
) -> None:
    """Aborts groups on their engines until `running` returns no key. Repeats the aborts, because an engine ignores an
    abort of a request that has not reached it yet. Raises RemoteError if some still run after `timeout_s`
    (`rollout.timeout_s`)."""
    pause = PAUSE_S
    deadline = asyncio.get_running_loop().time() + timeout_s
    while keys := running():
        homes: dict[tuple[EngineSlot, Any], list[str]] = defaultdict(list)
        for key in keys:
            if home := groups[key].home:
                homes[home].append(key)
        await asyncio.gather(
            *[_ended(slot, worker.abort.remote(here), timeout_s, WorkerLost) for (slot, worker), here in homes.items()]
        )  # with a lost engine its requests have ended
        if asyncio.get_running_loop().time() > deadline:
            raise RemoteError(f"the engines did not end {sorted(keys)} within {timeout_s:g} s (`rollout.timeout_s`)")
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.2)


def abort_in_background(key: str, slot: EngineSlot, worker: Any, timeout_s: float) -> None:
    """Aborts, in the background, a group that nobody waits for any more. The call is sent at once, so that a group that
    is started again under the same key comes after it."""
    task = asyncio.ensure_future(_ended(slot, worker.abort.remote([key]), timeout_s, RemoteError))
    _ending.add(task)
    task.add_done_callback(_ending.discard)


async def _ended(slot: EngineSlot, call: Any, timeout_s: float, allowed: type[RemoteError]) -> None:
    with suppress(allowed):
        await wait([call], timeout_s, slot.member("to end groups"), "rollout.timeout_s")
