"""Wraps the engines so that rollout functions generate the responses, with several turns each.

    stream ─▶ generate ─▶ per response: the function's next wish ◀─▶ one turn of an engine ─▶ Response with its mask

Each turn is a separate engine request, so engine loss, weight changes, aborts and seeds work as for any request. The
driver keeps the tokens, and sends sampled tokens back to the engine unchanged. A failed function is retried from the
first turn with the same seeds; then its response is unscorable. The loss of a worker does not count as a failure.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from dapo.pools import RolloutPool
from dapo.sampling.seeds import continued_seed
from dapo.turns.protocol import Ask, Generated, Trajectory
from dapo.types import Experts, Int32Array, Prompt, Request, Response, Sampling, Support, VersionSpan, joined_support
from dapo.workers.engines.requests import Prefix
from dapo.workers.remote import RemoteError
from dapo.workers.turns import TurnFleet, TurnLost, WorkerGone

T = TypeVar("T")
RETRY_PAUSE_S = 0.5
MAX_GONE = 4  # lost workers per response; a lost worker fails all of its calls, whichever one is the cause
MAX_FAILURES_IN_A_ROW = 128  # responses; then the function is considered broken
MAX_BEYOND_CAP = 16  # requests of one call after its response has reached its length limit; it may never end


class Engines(RolloutPool, Protocol):
    def generate(self, request: Request, prefix: Prefix | None = None) -> AsyncGenerator[tuple[int, Response]]: ...


class Aborted(Exception): ...


@dataclass(kw_only=True, slots=True)
class _Group:
    """A running group. running: keys of its turns on the engines. thinking: responses that wait for the function.
    prefix: common token prefix of its turns; the engine that has it takes all turns."""

    background: bool
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    running: set[str] = field(default_factory=set)
    thinking: int = 0
    prefix: Prefix = field(default_factory=Prefix)


@dataclass(kw_only=True, slots=True)
class Held:
    """A response of several turns so far. cut: it has reached its length limit."""

    token_ids: list[Int32Array] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    support: list[tuple[Support | None, int]] = field(default_factory=list)  # of each part, with its length
    experts: Experts | None = None  # of all tokens but the last, and the prompt's
    spans: list[VersionSpan] = field(default_factory=list)
    length: int = 0
    engine: int = -1
    seconds: float = 0.0
    cut: bool = False

    def give(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not sample."""
        if token_ids:
            count = len(token_ids)
            self._append(np.array(token_ids, np.int32), np.full(count, np.nan, np.float32), None, sampled=False)

    def take(self, part: Response) -> None:
        for span in part.policy_versions:
            moved = replace(span, start=span.start + self.length, end=span.end + self.length)
            if self.spans and (self.spans[-1].version, self.spans[-1].end) == (moved.version, moved.start):
                moved = replace(moved, start=self.spans.pop().start)
            self.spans.append(moved)
        self._append(part.token_ids, part.rollout_logprobs, part.support, sampled=True)
        self.engine, self.seconds = part.engine, self.seconds + part.seconds
        if self.experts is None:
            self.experts = part.experts
        elif part.experts is not None:  # of all tokens so far; those of the sampling policy stay
            self.experts = np.concatenate([self.experts, part.experts[len(self.experts) :]])

    def _append(self, token_ids: Int32Array, logprobs: np.ndarray, support: Support | None, *, sampled: bool) -> None:
        self.token_ids.append(token_ids)
        self.logprobs.append(logprobs)
        self.support.append((support, len(token_ids)))
        self.mask.append(np.full(len(token_ids), sampled))
        self.length += len(token_ids)

    def all_ids(self, prompt: Int32Array) -> Int32Array:
        return np.concatenate([prompt, *self.token_ids]) if self.token_ids else prompt

    def response(self, finish_reason: str, text: str = "") -> Response:
        mask = np.concatenate([np.zeros(0, np.bool_), *self.mask])
        return Response(
            token_ids=np.concatenate([np.zeros(0, np.int32), *self.token_ids]),
            rollout_logprobs=np.concatenate([np.zeros(0, np.float32), *self.logprobs]),
            text=text,
            finish_reason=finish_reason,
            policy_versions=tuple(self.spans),
            engine=self.engine,
            seconds=self.seconds,
            token_mask=None if mask.all() else mask,
            support=joined_support(self.support),
            experts=self.experts,
        )


class TrajectoryPool:
    """Replaces the engine pool if a function generates the responses (implements `dapo.pools.RolloutPool`)."""

    def __init__(
        self, engines: Engines, functions: TurnFleet, *, retries: int, warn: Callable[[str], None] = lambda line: None
    ) -> None:
        self._engines, self._functions = engines, functions
        self._retries, self._warn = retries, warn
        self._groups: dict[str, _Group] = {}
        self._failed_in_a_row = self._failed = self._longest = 0

    @property
    def capacity(self) -> int:
        return self._engines.capacity

    def room(self, n: int) -> int:
        """Number of groups of n responses that may start now. Responses that wait for the function will return to the
        engines."""
        thinking = sum(group.thinking for group in self._groups.values() if not group.background)
        return max(0, self._engines.room(n) - math.ceil(thinking / n))

    @property
    def spare(self) -> int:
        return max(0, self._engines.spare - sum(group.thinking for group in self._groups.values()))

    @property
    def serving(self) -> bool:
        return self._engines.serving

    def tokens_per_s(self) -> float:
        return self._engines.tokens_per_s()

    def lap(self) -> dict[str, float]:
        """Returns metrics of the engines since the last lap, and the total replacements of function workers."""
        return self._engines.lap() | {"perf/restarted_function_workers": float(self._functions.workers.restarts)}

    async def generate(self, request: Request) -> AsyncGenerator[tuple[int, Response]]:
        """Yields the responses to `request.problem` as they end, each with its number."""
        key, problem = request.key, request.problem
        assert problem is not None, "a function answers a problem and not tokens"
        group = self._groups[key] = _Group(background=request.background)
        tasks = {
            asyncio.ensure_future(self._response(group, f"{key}-t{number}", problem, request.sampling, seed)): number
            for number, seed in enumerate(request.seeds)
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
        """Aborts the named groups; returns when none of them is on an engine."""
        groups = [group for key in keys if (group := self._groups.get(key)) is not None]
        for group in groups:
            group.aborted.set()
        await self._engines.abort([turn for group in groups for turn in group.running])

    async def _response(self, group: _Group, name: str, prompt: Prompt, sampling: Sampling, seed: int) -> Response:
        """Returns one response, also if its function fails. Raises RemoteError if too many responses fail in a row."""
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
        # A failed response longer than any successful one does not count: it may be too long for a server that the
        # function calls, and the longest end together. Repeatedly lost workers end the run elsewhere.
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
        call = await _unless(group, self._functions.call(name))
        ended, beyond = False, 0
        try:
            step = await _unless(group, call.begin(prompt, sampling))
            while isinstance(step, Ask):
                if group.aborted.is_set():  # `abort` only covers turns that already run
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
        """Returns what the engines sample next; nothing if there is no room. Raises Aborted."""
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
            request = Request(key, held.all_ids(prompt), how, seeds, group.background)
            async with aclosing(self._engines.generate(request, group.prefix)) as parts:
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
    """Returns what the function answers; raises Aborted as soon as the group is aborted."""
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
