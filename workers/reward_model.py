"""Reward model workers and their driver-side pool: item 6 of the rewards (DESIGN section 6).

In: a prompt and a response, one call each, as responses end. Out: the model's score, NaN where there is none. What
waits travels together: a free worker takes its share in one remote call. A worker that dies or keeps silent is killed
and replaced and its responses are tried again; one on which workers fail alone is unscorable and never a zero.
"""

import asyncio
import logging
import math
import os
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from dapo.config.paths import resolve_path
from dapo.config.reward import RewardModelConfig
from dapo.types import Prompt, Response
from workers.remote import RemoteError, wait
from workers.scoring.classifier import Classifier, Conversation, Verdict, failed

log = logging.getLogger(__name__)

PASSES_PER_CALL = 4  # forward passes' worth of tokens in one call: sorting by length needs some to choose from
FAILURES_IN_A_ROW = 5  # of calls, per worker, with no success in between: then it is no accident
KEY = "reward.model.timeout_s"
CANARY = Conversation(
    prompt_id=-1, messages=(("user", "What is 2 + 2?"),), prompt_text="What is 2 + 2?", response=" It is 4."
)
CANARY_TOLERANCE = 0.05  # of the score, at least of 1: another kind of GPU in bfloat16 passes, other weights do not


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """pid: the worker's process. canary: its verdict on `CANARY`. Made by the worker, consumed by the pool."""

    pid: int
    canary: Verdict


@dataclass(kw_only=True, slots=True, eq=False)
class _Item:
    """A response that waits for its score. tokens: of the policy's tokenizer, to size a call by."""

    conversation: Conversation
    tokens: int
    verdict: "asyncio.Future[Verdict]"
    failures: int = 0


class RewardModelWorker:
    """One copy of the model in a process of its own; `start` comes first, because Ray hides a constructor's error."""

    def start(self, config: RewardModelConfig, path: str, device: str) -> Started:
        """Loads the model. Raises ValueError or OSError: see `Classifier`."""
        self._classifier = Classifier(config, path, device)
        return Started(pid=os.getpid(), canary=self._classifier.score([CANARY])[0])

    def score(self, conversations: Sequence[Conversation]) -> list[Verdict]:
        """One verdict per conversation, in order."""
        return self._classifier.score(conversations)


class RewardModelPool:
    """All copies of the model, seen from the driver; each has one call in flight.

    calls, scored: remote calls that ended well and responses in them. respawned: workers replaced. failures: responses
    without a score, by reason: those of `Verdict`, and "worker" where workers failed on them, at last on each alone.
    """

    def __init__(self, config: RewardModelConfig, options: Sequence[dict[str, Any]], *, device: str) -> None:
        """options: Ray options of each worker. Both these and device, `cpu` or `cuda`, are from `workers.cluster`."""
        self._config = config
        self._options = options
        self._arguments = (config, resolve_path(config.path), device)
        self._workers = [self._create(index) for index in range(len(options))]
        self._waiting: deque[_Item] = deque()
        self._arrived = asyncio.Event()
        self._free = len(options)
        self._lanes: list[asyncio.Task[None]] = []
        self._broken: RemoteError | None = None
        self._failed_in_a_row = 0
        self.pids = [0] * len(options)
        self.calls = self.scored = self.respawned = 0
        self.failures: Counter[str] = Counter()

    async def start(self, timeout_s: float) -> None:
        """Waits until every worker has loaded the model and has scored a plain conversation.

        timeout_s: also for every worker that takes another's place later.

        Raises:
            RemoteError: the model cannot be loaded or used, and why.
        """
        self._start_timeout_s = timeout_s
        self._expected = math.nan
        await asyncio.gather(*[self._start(index) for index in range(len(self._workers))])
        self._lanes = [asyncio.create_task(self._serve(index)) for index in range(len(self._workers))]

    async def score(self, prompt: Prompt, response: Response) -> float:
        """The model's score of one response, NaN where there is none: `failures` has the reason.

        Raises:
            RemoteError: the model cannot read this prompt, or workers fail again and again or cannot be replaced.
        """
        if self._broken is not None:
            raise self._broken
        conversation = Conversation(
            prompt_id=prompt.id, messages=prompt.messages, prompt_text=prompt.text, response=response.text
        )
        tokens = len(prompt.token_ids) + len(response.token_ids)
        item = _Item(conversation=conversation, tokens=tokens, verdict=asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._arrived.set()
        verdict = await item.verdict
        if verdict.failure == "prompt":
            raise RemoteError(
                f"the chat template of `reward.model.path` ({self._config.path}) refuses the messages of prompt "
                f"{prompt.id} ({verdict.detail}); use the roles that it knows or another reward model"
            )
        return verdict.score

    def stop(self) -> None:
        """Ends all workers; who still waits for a score is cancelled."""
        for lane in self._lanes:
            lane.cancel()
        for item in self._waiting:
            item.verdict.cancel()
        for worker in self._workers:
            ray.kill(worker)

    def _create(self, index: int) -> Any:
        worker: Any = ray.remote(RewardModelWorker)
        return worker.options(**self._options[index]).remote()

    async def _start(self, index: int) -> None:
        what = f"reward model worker {index} to load `reward.model.path` ({self._config.path})"
        ref = self._workers[index].start.remote(*self._arguments)
        [started] = await wait([ref], self._start_timeout_s, what, "rollout.start_timeout_s")
        self.pids[index] = started.pid
        canary = started.canary
        if canary.failure:
            raise RemoteError(
                f"the model in `reward.model.path` ({self._config.path}) has no score for a plain conversation "
                f"({' '.join([canary.failure, canary.detail]).strip()}); mend it or take another"
            )
        if math.isnan(self._expected):
            self._expected = canary.score
        if abs(canary.score - self._expected) > CANARY_TOLERANCE * max(1.0, abs(self._expected)):
            raise RemoteError(
                f"reward model worker {index} scores a plain conversation {canary.score:g} and another worker "
                f"{self._expected:g}; the files in `reward.model.path` ({self._config.path}) must be the same for all"
            )

    async def _serve(self, index: int) -> None:
        """The calls of one worker, one after the other. A worker that cannot be replaced ends the pool."""
        items: list[_Item] = []
        try:
            while True:
                items = await self._take()
                try:
                    verdicts = await self._call(index, items)
                except RemoteError as error:
                    self._give_back(index, items, error)
                    await self._replace(index)
                else:
                    self._settle(items, verdicts)
                self._free += 1
        except asyncio.CancelledError:
            for item in items:
                item.verdict.cancel()
            raise
        except Exception as error:
            self._fail(items, error)

    async def _take(self) -> list[_Item]:
        """What one call scores: this worker's share of what waits, bounded in tokens. What workers failed on twice is
        tried alone: should it be the cause, it takes no other down with it."""
        while True:
            while self._waiting and self._waiting[0].verdict.done():  # nobody waits for it any more
                self._waiting.popleft()
            if self._waiting:
                break
            self._arrived.clear()
            await self._arrived.wait()
        share = 1 if self._waiting[0].failures > 1 else math.ceil(len(self._waiting) / self._free)
        self._free -= 1
        items: list[_Item] = []
        tokens = 0
        while self._waiting and len(items) < share:
            tokens += self._waiting[0].tokens
            if items and tokens > PASSES_PER_CALL * self._config.max_tokens:
                break
            items.append(self._waiting.popleft())
        return items

    async def _call(self, index: int, items: Sequence[_Item]) -> list[Verdict]:
        ref = self._workers[index].score.remote([item.conversation for item in items])
        what = f"reward model worker {index} to score {len(items)} responses"
        [verdicts] = await wait([ref], self._config.timeout_s, what, KEY)
        self._failed_in_a_row = 0
        self.calls += 1
        self.scored += len(items)
        return list(verdicts)

    def _settle(self, items: Sequence[_Item], verdicts: Sequence[Verdict]) -> None:
        for item, verdict in zip(items, verdicts, strict=True):
            if verdict.failure:
                self.failures[verdict.failure] += 1
                if self.failures[verdict.failure] == 1:
                    number, reason = item.conversation.prompt_id, f"{verdict.failure} {verdict.detail}".strip()
                    log.warning(
                        "the reward model has no score for a response to prompt %d: %s (told once, then counted)",
                        number,
                        reason,
                    )
            if not item.verdict.done():
                item.verdict.set_result(verdict)

    def _give_back(self, index: int, items: Sequence[_Item], error: RemoteError) -> None:
        """What a worker failed on goes to the front; unscorable is what a second failure, alone, was for."""
        self._failed_in_a_row += 1
        log.warning("%s; reward model worker %d is replaced", error, index)
        if self._failed_in_a_row >= FAILURES_IN_A_ROW * len(self._workers):
            raise RemoteError(f"the reward model failed {self._failed_in_a_row} times in a row; the last time {error}")
        for item in items:
            item.failures += 1
        if len(items) == 1 and items[0].failures > 1:
            self._settle(items, [failed("worker", str(error))])
            return
        self._waiting.extendleft(reversed(items))
        self._arrived.set()

    async def _replace(self, index: int) -> None:
        ray.kill(self._workers[index])
        self._workers[index] = self._create(index)
        self.respawned += 1
        await self._start(index)

    def _fail(self, items: Sequence[_Item], error: Exception) -> None:
        """From now on every call of `score` raises, those that wait included: better than to wait for ever."""
        if self._broken is None:
            self._broken = error if isinstance(error, RemoteError) else RemoteError(f"{type(error).__name__}: {error}")
        for item in (*items, *self._waiting):
            if not item.verdict.done():
                item.verdict.set_exception(self._broken)
        self._waiting.clear()
