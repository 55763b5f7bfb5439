"""Samples and scores answers to every held-out prompt with one policy.

    parts of <= 8 samples ──▶ free slots of the engines ──▶ reward workers ──▶ groups, put together by problem

It only takes slots that nothing else can use, until a caller waits for its end. Seeds depend on prompt and sample but
not on the policy version, so that two evaluations differ only by the policy.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dapo.config.derived import response_caps
from dapo.config.schema import Config
from dapo.ground.clock import PhaseClock
from dapo.ground.fault_points import fault_point
from dapo.pools import RewardPool, RolloutPool
from dapo.sampling.seeds import response_seed
from dapo.sampling.stream import CLOSE_GRACE_S, ended_unasked, sampling_of, scored_group
from dapo.types import Cut, Draw, Group, HeldOut, Prompt, Request

PART = 8  # samples per request: few enough to fit into free slots, enough to be worth a request


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Scored answers of one evaluation. Made by `Evaluation`, consumed by `dapo.evaluation.summary`. version: of the
    policy that sampled every token. sets: one group per problem, by name of the set."""

    version: int
    sets: dict[str, tuple[Group, ...]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Part:
    """Samples [first, first + count) of one prompt. place: number of its held-out set."""

    place: int
    prompt: Prompt
    first: int
    count: int

    def key(self, version: int) -> str:
        return f"eval-v{version}-{self.place}-{self.prompt.id}-{self.first}"


class Evaluation:
    def __init__(
        self,
        held_out: Sequence[HeldOut],
        rollouts: RolloutPool,
        rewards: RewardPool,
        cfg: Config,
        *,
        version: int,
        answered: Callable[[int], None] = lambda count: None,
    ) -> None:
        """version: what the engines serve. answered: called with the number of new answers."""
        self.version = version
        self._held_out = held_out
        self._rollouts = rollouts
        self._rewards = rewards
        self._sampling = replace(sampling_of(cfg.eval, cfg.data.max_response_length), logprobs=False)
        self._caps = response_caps(cfg.data.sources)
        self._seed = cfg.trainer.seed
        self._answered = answered
        self._left = deque(_parts(held_out))
        self._total, self._ended = sum(part.count for part in self._left), 0
        self._running: dict[_Part, asyncio.Task[None]] = {}
        self._groups: dict[tuple[int, int], dict[int, Group]] = {}  # by set and prompt, then by first sample
        self._wake = asyncio.Event()
        self._awaited = False
        self._task: asyncio.Task[Answered] | None = None

    def wake(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._wake.set()

    def hurry(self) -> None:
        """From now on competes for slots like any other request, because a caller waits for the end."""
        self._awaited = True
        self.wake()

    async def answers(self) -> Answered:
        self.wake()
        assert self._task is not None
        return await asyncio.shield(self._task)

    def progress(self) -> tuple[int, int]:
        return self._ended, self._total

    async def close(self) -> None:
        """Aborts what is in flight, within `CLOSE_GRACE_S`, and ignores its errors; may be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._running:
            with suppress(Exception):
                keys = [part.key(self.version) for part in self._running]
                await asyncio.wait_for(self._rollouts.abort(keys), CLOSE_GRACE_S)
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()

    async def _run(self) -> Answered:
        while self._left or self._running:
            await self._wake.wait()
            self._wake.clear()
            for part in [part for part, task in self._running.items() if task.done()]:
                self._running.pop(part).result()
            room = self._room()
            while self._left and self._left[0].count <= room:
                room -= self._left[0].count
                self._start(self._left.popleft())
            await asyncio.sleep(0)  # let new tasks take their slots
        return self._together()

    def _room(self) -> int:
        if not self._awaited:
            return self._rollouts.spare
        if not self._running:
            return max(PART, 2 * self._rollouts.capacity)
        return 2 * self._rollouts.capacity - sum(part.count for part in self._running)

    def _start(self, part: _Part) -> None:
        self._running[part] = task = asyncio.create_task(self._answer(part, part.key(self.version)))
        task.add_done_callback(lambda _: self._wake.set())

    async def _answer(self, part: _Part, key: str) -> None:
        samples = range(part.first, part.first + part.count)
        seeds = [response_seed(self._seed, "eval", part.prompt.id, sample) for sample in samples]
        prompt, aside = part.prompt, not self._awaited
        cap = self._caps.get(prompt.entry, self._sampling.max_tokens)
        sampling = replace(self._sampling, n=part.count, max_tokens=cap)
        request = Request(key, prompt.token_ids, sampling, seeds, background=aside, problem=prompt)
        responses = self._rollouts.generate(request)
        draw = Draw(index=part.prompt.id, prompt=part.prompt)
        group = await scored_group(draw, responses, self._rewards, PhaseClock())
        if isinstance(group, Cut):
            raise ended_unasked(key)
        versions = {span.version for response in group.responses for span in response.policy_versions}
        if versions - {self.version}:
            raise RuntimeError(
                f"answers of the evaluation of policy version {self.version} were sampled by versions "
                f"{sorted(versions)}; the engines changed their weights under it"
            )
        self._groups.setdefault((part.place, part.prompt.id), {})[part.first] = group
        self._ended += part.count
        fault_point("driver.evaluated")
        self._answered(part.count)

    def _together(self) -> Answered:
        found: dict[str, tuple[Group, ...]] = {}
        for place, held_out in enumerate(self._held_out):
            parts = [self._groups[place, prompt.id] for prompt in held_out.prompts]
            found[held_out.name] = tuple(_joined([each[first] for first in sorted(each)]) for each in parts)
        return Answered(version=self.version, sets=found)


def _parts(held_out: Sequence[HeldOut]) -> list[_Part]:
    return [
        _Part(place=place, prompt=prompt, first=first, count=min(PART, samples - first))
        for place, one in enumerate(held_out)
        for prompt, samples in zip(one.prompts, one.samples, strict=True)
        for first in range(0, samples, PART)
    ]


def _joined(groups: Sequence[Group]) -> Group:
    return Group(
        draw=groups[0].draw,
        responses=tuple(response for group in groups for response in group.responses),
        scores=tuple(score for group in groups for score in group.scores),
    )
