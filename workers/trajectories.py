"""Lets rollout functions make the responses: it wraps the engines, and fulfils what the stream asks of them.

    stream ─▶ generate ─▶ per response: the function's next wish ◀─▶ one turn of an engine ─▶ Response with its mask

In: prompts. Out: responses of several turns. Each turn is a request of its own to the engines, so that their loss, a
change of weights, an abort and seeds work as for any other. The driver keeps the tokens: what was sampled goes back to
the engine as it is. A function that fails is tried again from the first turn, with the same seeds, and then its
response is unscorable; a worker that is lost counts for none of its calls.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from dapo.pools import RolloutPool
from dapo.sampling.seeds import continued_seed
from dapo.turns.protocol import Ask, Generated, Trajectory
from dapo.types import Int32Array, Prompt, Response, Sampling
from workers.engines.group import Prefix
from workers.remote import RemoteError
from workers.turns.fleet import TurnFleet, TurnLost, WorkerGone
from workers.turns.held import Held

T = TypeVar("T")
RETRY_PAUSE_S = 0.5
MAX_GONE = 4  # workers that are lost with a response: each takes along all calls that it has, whichever is to blame
MAX_FAILURES_IN_A_ROW = 128  # responses: the function is broken, not they
MAX_BEYOND_CAP = 16  # wishes of one call after its response has reached its cap: it will never end by itself


class Engines(RolloutPool, Protocol):
    """Names what is needed of the engines: see `workers.rollout.RolloutPool`."""

    def generate(
        self,
        key: str,
        prompt: Int32Array,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        background: bool = False,
        problem: Prompt | None = None,
        prefix: Prefix | None = None,
    ) -> AsyncGenerator[tuple[int, Response]]: ...


class Aborted(Exception):
    """Says that a group is not wanted any more."""


@dataclass(kw_only=True, slots=True)
class _Group:
    """Follows a group. running: keys of its turns that are with the engines. thinking: responses that are with the
    function. prefix: what all of them begin with; the engine that has it takes all turns."""

    background: bool
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    running: set[str] = field(default_factory=set)
    thinking: int = 0
    prefix: Prefix = field(default_factory=Prefix)


class TrajectoryPool:
    """Stands for the engines where a function makes the responses (`dapo.pools.RolloutPool`)."""

    def __init__(
        self, engines: Engines, functions: TurnFleet, *, retries: int, warn: Callable[[str], None] = lambda line: None
    ) -> None:
        """Wraps the engines. retries: of a response whose function failed."""
        self._engines, self._functions = engines, functions
        self._retries, self._warn = retries, warn
        self._groups: dict[str, _Group] = {}
        self._failed_in_a_row = self._failed = self._longest = 0

    @property
    def capacity(self) -> int:
        """Counts the responses that all engines together run at once."""
        return self._engines.capacity

    def room(self, n: int) -> int:
        """Counts the groups of n responses that may start now; those that are with the function come back."""
        thinking = sum(group.thinking for group in self._groups.values() if not group.background)
        return max(0, self._engines.room(n) - math.ceil(thinking / n))

    @property
    def spare(self) -> int:
        """Counts the responses that may start in the background."""
        return max(0, self._engines.spare - sum(group.thinking for group in self._groups.values()))

    @property
    def serving(self) -> bool:
        """Returns whether an engine serves now."""
        return self._engines.serving

    def tokens_per_s(self) -> float:
        """Returns what the engines generated a second lately."""
        return self._engines.tokens_per_s()

    def lap(self) -> dict[str, float]:
        """Returns what the engines did since the last lap, and how many of the function's workers were replaced so far,
        as metrics."""
        return self._engines.lap() | {"perf/restarted_function_workers": float(self._functions.respawned)}

    async def generate(
        self,
        key: str,
        prompt: Int32Array,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        background: bool = False,
        problem: Prompt | None = None,
    ) -> AsyncGenerator[tuple[int, Response]]:
        """Yields the responses to `problem` as they end, each with its number; response number k has `seeds[k]`."""
        assert problem is not None, "a function answers a problem and not tokens"
        group = self._groups[key] = _Group(background=background)
        tasks = {
            asyncio.ensure_future(self._response(group, f"{key}-t{number}", problem, sampling, seed)): number
            for number, seed in enumerate(seeds)
        }
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield tasks.pop(task), task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del self._groups[key]

    async def abort(self, keys: list[str]) -> None:
        """Ends the named groups wherever they are; returns when none of them is with an engine."""
        groups = [group for key in keys if (group := self._groups.get(key)) is not None]
        for group in groups:
            group.aborted.set()
        await self._engines.abort([turn for group in groups for turn in group.running])

    async def _response(self, group: _Group, name: str, prompt: Prompt, sampling: Sampling, seed: int) -> Response:
        """Returns one response, whatever becomes of its function. Raises RemoteError where nothing ends well."""
        failed, gone, why = 0, 0, ""
        while failed <= self._retries and gone <= MAX_GONE:
            held = Held()
            try:
                response = await self._attempt(group, held, f"{name}-a{failed + gone}", prompt, sampling, seed)
            except Aborted:
                return held.response("abort")
            except TurnLost as error:
                is_gone = isinstance(error, WorkerGone)
                failed, gone = failed + (not is_gone), gone + is_gone
                why = f"prompt {prompt.id}, attempt {failed + gone}: {error}"
                self._tell(why)
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            self._failed_in_a_row, self._longest = 0, max(held.length, self._longest)
            return response
        # The longest may be too long for what the function asks, and end together: longer than any that has come out,
        # it says nothing. Workers that end again and again end the run by themselves.
        if failed > self._retries and (held.length <= self._longest or not self._longest):
            self._failed_in_a_row += 1
        if self._failed_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RemoteError(
                f"`rollout.function` failed for {MAX_FAILURES_IN_A_ROW} responses in a row; fix it. The last one: {why}"
            )
        return held.response("error")

    async def _attempt(
        self, group: _Group, held: Held, name: str, prompt: Prompt, sampling: Sampling, seed: int
    ) -> Response:
        """Raises Aborted, TurnLost."""
        call = await _unless(group, self._functions.call(name))
        ended, beyond = False, 0
        try:
            step = await _unless(group, call.begin(prompt, sampling))
            while isinstance(step, Ask):
                if group.aborted.is_set():  # since the function has answered: `abort` knows of no turn to come
                    raise Aborted
                key = f"{name}-{held.length}"
                generated = await self._turn(group, held, key, prompt.token_ids, sampling, seed, step)
                beyond += not generated.token_ids
                if beyond > MAX_BEYOND_CAP:
                    raise TurnLost(f"it asked {beyond} times for tokens after its response had reached its cap")
                step = await _unless(group, call.resume(generated))
            ended = True
            assert isinstance(step, Trajectory), "what failed has raised"
            if not any(part.any() for part in held.mask):
                raise TurnLost("it returned without a token of the policy; await `generate` at least once")
            return held.response("length" if held.cut else "stop", step.text)
        finally:
            call.close(ended=ended)

    async def _turn(
        self, group: _Group, held: Held, key: str, prompt: Int32Array, sampling: Sampling, seed: int, ask: Ask
    ) -> Generated:
        """Returns what the engines sample next; nothing where there is no room. Raises Aborted."""
        room = sampling.max_tokens - held.length - len(ask.token_ids)
        if room < 1:
            held.cut = True
            return Generated(token_ids=(), text="", finish_reason="length")
        held.give(ask.token_ids)
        cap = room if ask.max_tokens is None else min(room, ask.max_tokens)
        how = replace(sampling, n=1, max_tokens=cap, stop=ask.stop)
        seeds = [continued_seed(seed, held.length)]
        group.running.add(key)
        try:
            ids, background = held.all_ids(prompt), group.background
            parts = self._engines.generate(key, ids, how, seeds, background=background, prefix=group.prefix)
            async with aclosing(parts):
                [(_, part)] = [each async for each in parts]
        finally:
            group.running.discard(key)
        held.take(part)
        if part.aborted:
            raise Aborted
        held.cut = part.truncated and cap == room
        return Generated(token_ids=tuple(part.token_ids.tolist()), text=part.text, finish_reason=part.finish_reason)

    def _tell(self, what: str) -> None:
        self._failed += 1
        if self._failed & (self._failed - 1) == 0:
            self._warn(f"rollout.function: {what} (failure number {self._failed})")


async def _unless(group: _Group, awaited: Awaitable[T]) -> T:
    """Returns what the function answers; raises Aborted as soon as the group is not wanted."""
    answer = asyncio.ensure_future(awaited)
    end = asyncio.ensure_future(group.aborted.wait())
    group.thinking += 1
    try:
        await asyncio.wait({answer, end}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Aborted
        return answer.result()
    finally:
        group.thinking -= 1
        answer.cancel()
        end.cancel()
