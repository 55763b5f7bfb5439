"""Streams draws out to the engines and scored groups back into the buffer (DAPO, Algorithm 1).

There is no generation barrier: a response is scored when it ends, its group is kept when all have their scores, and the
buffer refills at once. What runs concurrently, all on one event loop:

|                     | consumes               | produces                  | waits for         | unblocked by         |
|---------------------|------------------------|---------------------------|-------------------|----------------------|
| pump                | ended groups, room     | a task per draw that      | `_wake`           | a response or group  |
|                     |                        | `buffer.take` gives       |                   | that ends; `collect` |
| `scored_group`, one | responses of one draw  | reward calls, then a      | its responses,    | engine, reward       |
| per draw            |                        | `Group` or a `Cut`        | then its scores   | workers, `_abort`    |
| `collect`, by the   | what `buffer.close`    | `Collected`, one per step | a full batch      | the pump, or its end |
| trainer             | gives                  |                           |                   |                      |
| `_abort`, at the    | returned draws         | their `Cut`s, counted     | the unfinished    | the engines, within  |
| end of `collect`    |                        |                           | ones to end       | `rollout.timeout_s`  |

An evaluation runs beside it, in slots that the pump leaves free (`on_filled`).
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import fields, replace

from dapo.config.derived import support_size
from dapo.config.sampling import SamplingConfig
from dapo.config.schema import Config
from dapo.data.order import PromptOrder
from dapo.ground.clock import PhaseClock
from dapo.pools import Lender, RewardPool, RolloutPool
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.seeds import response_seed
from dapo.types import Collected, Cut, Draw, Group, Prompt, Request, Response, Sampling, Score, unscorable


class Traffic:
    """running: responses. ended: since `began` (`time.monotonic()`), when the step began to collect. tokens_per_s: what
    the engines generate now, unfinished responses included: a batch of long responses may end all at once."""

    def __init__(self, tokens_per_s: Callable[[], float] = lambda: 0.0) -> None:
        self.tokens_per_s = tokens_per_s
        self.running = 0
        self.open()
        self._groups: dict[str, tuple[float, int]] = {}  # when each started, and how many of its responses still run

    def open(self) -> None:
        self.began, self.ended = time.monotonic(), 0

    def start(self, key: str, responses: int) -> None:
        self._groups[key] = time.monotonic(), responses
        self.running += responses

    def end(self, key: str) -> None:
        since, left = self._groups[key]
        self._groups[key] = since, left - 1
        self.running -= 1
        self.ended += 1

    def close(self, key: str) -> None:
        """Removes a group, including responses that will never end."""
        _, left = self._groups.pop(key)
        self.running -= left

    def longest_s(self, now: float) -> float:
        """Returns for how many seconds the longest response has been running, its wait for a slot included; 0 without
        one. now: `time.monotonic()`. May be called from another thread."""
        return next((now - since for since, left in list(self._groups.values()) if left), 0.0)


CLOSE_GRACE_S = 5.0

Responses = AsyncGenerator[tuple[int, Response]]


def sampling_of(section: SamplingConfig, max_tokens: int) -> Sampling:
    values = {field.name: getattr(section, field.name) for field in fields(SamplingConfig)}
    return Sampling(max_tokens=max_tokens, **values)


def training_sampling(cfg: Config) -> Sampling:
    return replace(
        sampling_of(cfg.rollout, cfg.data.max_response_length),
        support=support_size(cfg),
        support_logprobs=cfg.algorithm.score_centering > 0,
        experts=cfg.rollout.replay_experts,
    )


async def score_of(prompt: Prompt, sample: int, response: Response, rewards: RewardPool) -> Score:
    """Scores one response; one whose rollout function failed is unscorable, without a call of the verifier."""
    return unscorable("rollout") if response.failed else await rewards.score(prompt, sample, response)


async def scored_group(
    draw: Draw,
    responses: Responses,
    rewards: RewardPool,
    clock: PhaseClock,
    wanted: Callable[[], bool] = lambda: True,
    noted: Callable[[Score], None] = lambda score: None,
) -> Group | Cut:
    """Scores each response as it ends; `noted` is called with each score. Returns a Cut if a response was aborted, or
    if the group is not wanted any more when its generation ends; its scores are not awaited then."""
    ended: dict[int, Response] = {}
    verdicts: dict[int, asyncio.Future[Score]] = {}

    async def scored(sample: int, response: Response) -> Score:
        score = await score_of(draw.prompt, sample, response, rewards)
        noted(score)
        return score

    try:
        with clock("generation"):
            async with aclosing(responses):
                async for sample, response in responses:
                    ended[sample] = response
                    if not response.aborted:
                        verdicts[sample] = asyncio.ensure_future(scored(sample, response))
        in_order = tuple(ended[sample] for sample in sorted(ended))
        if len(verdicts) < len(ended) or not wanted():
            return Cut(lengths=tuple(response.num_sampled for response in in_order))
        with clock("reward"):
            scores = await asyncio.gather(*[verdicts[sample] for sample in sorted(verdicts)])
        return Group(draw=draw, responses=in_order, scores=tuple(scores))
    finally:
        for verdict in verdicts.values():
            verdict.cancel()


def ended_unasked(key: str) -> RuntimeError:
    return RuntimeError(f"an engine ended group {key} unasked; its log may say why")


class GroupStream:
    """Keeps the requested number of draws in flight, also during updates (at staleness 0, none is requested then)."""

    def __init__(
        self,
        order: PromptOrder,
        buffer: OversamplingBuffer,
        rollouts: RolloutPool,
        rewards: RewardPool,
        sampling: Sampling,
        *,
        seed: int,
        clock: PhaseClock,
        lender: Lender | None = None,
        caps: Mapping[str, int] | None = None,
        on_filled: Callable[[], None] = lambda: None,
    ) -> None:
        """lender: of engines that may help while a batch is far from full. caps: longest responses, in tokens, of the
        entries of `data.sources` that have their own. on_filled: called when the engines have all they can get."""
        self.buffer = buffer
        self._lender = lender
        self.traffic = Traffic(rollouts.tokens_per_s)
        self._order = order
        self._rollouts = rollouts
        self._rewards = rewards
        self._sampling = sampling
        self._seed = seed
        self._clock = clock
        self._caps = caps or {}
        self._running: dict[str, tuple[int, asyncio.Task[Group | Cut]]] = {}  # by key, unique per start of a draw
        self._leaving: dict[str, asyncio.Task[Group | Cut]] = {}  # being aborted by the engines
        self._finished: deque[str] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._on_filled = on_filled

    async def collect(self) -> Collected:
        """Returns a full batch for the next update. Raises BudgetExhausted as `OversamplingBuffer.take` does, and
        errors of the pools, also if they score known answers wrong."""
        self.buffer.open()
        self.traffic.open()
        self._full.clear()
        self._wake.set()
        if self._pump is None:
            self._pump = asyncio.create_task(self._run())
        full = asyncio.create_task(self._full.wait())
        try:
            await asyncio.wait({full, self._pump}, return_when=asyncio.FIRST_COMPLETED)
            if self._pump.done():
                self._pump.result()
            await self._rewards.check()
            return await self._abort(self.buffer.close())
        finally:
            full.cancel()

    def serving(self, version: int) -> None:
        """The engines serve policy `version` from now on: idle ones may have room for draws of it."""
        self.buffer.serving(version)
        self._wake.set()

    async def close(self) -> None:
        """Ends the pump and aborts draws in flight; the buffer keeps finished groups. The engines may be what failed:
        they have `CLOSE_GRACE_S`, and their errors are ignored."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
            self._pump = None
        if self._lender is not None:
            await self._lender.close()
        left = {key: task for key, (_, task) in self._running.items()} | self._leaving
        if left:
            with suppress(Exception):
                await asyncio.wait_for(self._rollouts.abort(list(left)), CLOSE_GRACE_S)
        for task in left.values():
            task.cancel()
        await asyncio.gather(*left.values(), return_exceptions=True)
        self._running.clear()
        self._leaving.clear()

    async def _run(self) -> None:
        while True:
            for index in self.buffer.take(self._rollouts.room(self._sampling.n)):
                self._start(index)
            if self.buffer.collecting and self.buffer.full:
                self._full.set()
            await asyncio.sleep(0)  # let new tasks take their slots
            if self._lender is not None and self.buffer.collecting and not self.buffer.full:
                self._lender.consider(self.buffer.missing * self._sampling.n, self._wake.set)
            self._on_filled()
            await self._wake.wait()
            self._wake.clear()
            while self._finished:
                key = self._finished.popleft()
                if key not in self._running:  # its draw was returned to the stream
                    continue
                group = self._running.pop(key)[1].result()
                if isinstance(group, Cut):
                    raise ended_unasked(key)
                self.buffer.add(group)

    def _start(self, index: int) -> None:
        version = self.buffer.version
        refusals = self.buffer.refusals[index, version]
        again = [refusals] if refusals else []  # a refused response must not be sampled again
        key, draw = "-".join([f"v{version}-d{index}", *map(str, again)]), self._order.draw(index)
        seeds = [response_seed(self._seed, index, version, sample, *again) for sample in range(self._sampling.n)]
        prompt = draw.prompt
        sampling = replace(self._sampling, max_tokens=self._caps.get(prompt.entry, self._sampling.max_tokens))
        responses = self._rollouts.generate(Request(key, prompt.token_ids, sampling, seeds, problem=prompt))
        watched = self._watched(index, key, responses)

        def noted(score: Score) -> None:
            # Its draw has not started again.
            if key in self._running and self.buffer.verdict(index, score.accuracy):
                self._wake.set()

        group = scored_group(draw, watched, self._rewards, self._clock, lambda: key in self._running, noted)
        task = asyncio.create_task(group)
        self._running[key] = (index, task)
        task.add_done_callback(lambda _: self._finish(key))

    def _finish(self, key: str) -> None:
        self._finished.append(key)
        self._wake.set()

    async def _watched(self, index: int, key: str, responses: Responses) -> Responses:
        """Forwards the responses; wakes the pump after each, as a slot may be free, and notifies the buffer at the
        end."""
        tokens = 0
        self.traffic.start(key, self._sampling.n)
        try:
            async with aclosing(responses):
                async for sample, response in responses:
                    tokens += response.num_sampled
                    self.traffic.end(key)
                    self._wake.set()
                    yield sample, response
        finally:
            self.traffic.close(key)
        if key in self._running:
            self.buffer.generated(index, tokens)

    async def _abort(self, collected: Collected) -> Collected:
        """Aborts the returned draws and counts their generated tokens. If that fails, `close` aborts them."""
        returned = set(collected.returned)
        gone = {key: place for key, place in self._running.items() if place[0] in returned}
        for key, (index, task) in gone.items():
            del self._running[key]
            if index in collected.unfinished:
                self._leaving[key] = task
            else:
                task.cancel()  # its score is not awaited
        if not self._leaving:
            return collected
        await self._rollouts.abort(list(self._leaving))
        cut = await asyncio.gather(*self._leaving.values())
        self._leaving.clear()
        tokens = sum(group.num_tokens for group in cut)
        self.buffer.aborted(tokens)
        return replace(collected, lost=(*collected.lost, *cut), lost_tokens=collected.lost_tokens + tokens)
