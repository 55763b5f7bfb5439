"""Scores responses with copies of a reward model, through a driver-side pool; NaN if there is no score. Waiting
responses are batched, with a bounded number of tokens per remote call. Responses of a lost worker are retried, each
alone, and then are unscorable, never zero."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from dapo.config.paths import resolve_path
from dapo.config.reward import RewardModelConfig
from dapo.ground.watchdog import Member
from dapo.types import Prompt, Response
from dapo.workers.remote import RemoteError, wait
from dapo.workers.scoring.classifier import Classifier, Conversation, ModelScore, no_score
from dapo.workers.scoring.fleet import Fleet, WorkerLost
from dapo.workers.scoring.verdict import MAX_FAILURES_IN_A_ROW, RETRY_PAUSE_S, CanaryError, is_told

LONG = ("too_long", "memory")  # failures of long responses, which end last and so follow one another
TRIES_ALONE = 2  # of a response lost with its worker: it may be the cause, or the node's other workers are lost next
PASSES_PER_CALL = 4  # forward passes' worth of tokens in one call, so that sorting by length is useful
CANARY = Conversation(
    prompt_id=-1, messages=(("user", "What is 2 + 2?"),), prompt_text="What is 2 + 2?", response=" It is 4."
)
CANARY_TOLERANCE = 0.05  # relative to max(1, |score|): passes another GPU type in bfloat16, not other weights


class RewardModelWorker:
    """One copy of the model; call `start` first (not a constructor, because Ray hides a constructor's error)."""

    def start(self, config: RewardModelConfig, path: str, device: str) -> ModelScore:
        """Loads the model and returns its score of `CANARY`. Raises ValueError or OSError: see `Classifier`."""
        self._classifier = Classifier(config, path, device)
        return self._classifier.score([CANARY])[0]

    def score(self, conversations: Sequence[Conversation]) -> Iterator[list[tuple[int, ModelScore]]]:
        """Yields all scores at once, with the numbers of their conversations."""
        yield list(enumerate(self._classifier.score(conversations)))


class RewardModelPool:
    """All copies of the model. failures: responses without a score, by reason: those of `ModelScore`, or "worker" if
    workers were lost with the response alone."""

    def __init__(
        self,
        config: RewardModelConfig,
        options: Sequence[dict[str, Any]],
        *,
        device: str,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """options: Ray options of each worker. options and device, `cpu` or `cuda`, are from `workers.placement`."""
        self._options = options
        self._arguments = (config, resolve_path(config.path), device)
        self._key = f"`reward.model.path` ({config.path})"
        self._warn = warn
        self._window = PASSES_PER_CALL * config.max_tokens
        self._expected = math.nan
        self.failures: Counter[str] = Counter()
        self._failed_in_a_row = 0
        self.fleet = Fleet(
            self._create,
            self._start_worker,
            name="reward model worker",
            count=len(options),
            window=self._window,
            timeout_s=config.timeout_s,
            timeout_key="reward.model.timeout_s",
            one_call=True,
            warn=warn,
        )

    async def start(self, timeout_s: float) -> None:
        """Waits until every worker has loaded the model and scored a plain conversation. timeout_s: also for every
        replacement later. Raises RemoteError if the model cannot be loaded or used."""
        await self.fleet.workers.start(timeout_s)

    async def score(self, prompt: Prompt, response: Response) -> float:
        """Returns the model's score of one response, NaN if there is none: `failures` counts the reason. Raises
        RemoteError if no response gets a score any more, or workers fail repeatedly."""
        conversation = Conversation(
            prompt_id=prompt.id, messages=prompt.messages, prompt_text=prompt.text, response=response.text
        )
        score = await self._score(conversation, len(prompt.token_ids) + len(response.token_ids))
        self._watch(score, prompt)
        return score.value

    def stop(self) -> None:
        self.fleet.workers.stop()

    def _watch(self, score: ModelScore, prompt: Prompt) -> None:
        """Counts and logs responses without a score; raises if there are no others."""
        if not score.failure:
            self._failed_in_a_row = 0
            return
        self.failures[score.failure] += 1
        count, why = self.failures[score.failure], f"{score.failure} {score.detail}".strip()
        if is_told(count):
            what = f"a response to prompt {prompt.id} has no score: {why} (`{score.failure}` number {count})"
            self._warn(f"reward model: {what}")
        if score.failure not in LONG:
            self._failed_in_a_row += 1
        if self._failed_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RemoteError(
                f"the model in {self._key} scores none of {self._failed_in_a_row} responses in a row; the last, to "
                f"prompt {prompt.id}: {why}; use prompts with the roles that its chat template knows, or another model"
            )

    async def _score(self, conversation: Conversation, tokens: int) -> ModelScore:
        """Tries up to three times; retries run alone, so that a response that kills workers takes no other one with it.
        tokens: of the policy's tokenizer, to size a call."""
        try:
            return (await self.fleet.score(conversation, cost=tokens))[0]
        except WorkerLost as lost:
            why = lost
        for _ in range(TRIES_ALONE):
            await asyncio.sleep(RETRY_PAUSE_S)
            try:
                return (await self.fleet.score(conversation, cost=self._window, avoid=why.worker))[0]
            except WorkerLost as lost:
                why = lost
        return no_score("worker", str(why))

    def _create(self, index: int) -> Any:
        worker: Any = ray.remote(RewardModelWorker)
        return worker.options(**self._options[index]).remote()

    async def _start_worker(self, worker: Any, index: int, timeout_s: float) -> None:
        what = Member(role="reward model worker", number=index, count=len(self._options), act=f"to load {self._key}")
        [canary] = await wait([worker.start.remote(*self._arguments)], timeout_s, what, "rollout.start_timeout_s")
        if canary.failure:
            why = f"{canary.failure} {canary.detail}".strip()
            raise RemoteError(
                f"the model in {self._key} has no score for a plain conversation ({why}); fix it or take another"
            )
        if math.isnan(self._expected):
            self._expected = canary.value
        if abs(canary.value - self._expected) > CANARY_TOLERANCE * max(1.0, abs(self._expected)):
            raise RemoteError(
                f"reward model worker {index} scores a plain conversation {canary.value:g} and another worker "
                f"{self._expected:g}; the files in {self._key} must be the same for all"
            ) from CanaryError()
