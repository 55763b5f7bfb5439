"""Reward workers and their driver-side pool (DESIGN section 6).

In: a prompt and its responses. Out: one `Score` per response: the weighted reward functions, then the overlong penalty.
A worker that does not answer in time is killed and replaced and the group tried once more; a second silence makes the
group unscorable (NaN) and never a zero, which would make mixed groups out of nothing.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from dapo.config import OverlongBufferConfig, RewardFunctionConfig
from dapo.rewards.functions import RewardFunctions
from dapo.rewards.overlong import overlong_penalty
from dapo.types import Prompt, Response, Score
from workers.remote import RemoteError, wait


class RewardWorker:
    """Scores responses in a process of its own; `start` comes first, because Ray hides a constructor's error."""

    def start(
        self, functions: list[RewardFunctionConfig], overlong: OverlongBufferConfig, max_response_length: int
    ) -> None:
        """Loads the reward functions. Raises ValueError: see `dapo.rewards.functions`."""
        self._functions = RewardFunctions(functions)
        self._overlong = overlong
        self._max_response_length = max_response_length

    def score(
        self, source: str, ground_truth: str, extra_info: dict[str, Any], answers: list[tuple[str, int]]
    ) -> list[Score]:
        """answers: text and number of tokens of each response."""
        return [self._score_one(source, ground_truth, extra_info, *answer) for answer in answers]

    def _score_one(self, source: str, ground_truth: str, extra_info: dict[str, Any], text: str, tokens: int) -> Score:
        score = self._functions.score(source, text, ground_truth, extra_info)
        if not self._overlong.enable:
            return score
        penalty = overlong_penalty(
            tokens,
            max_response_length=self._max_response_length,
            buffer_length=self._overlong.len,
            penalty_factor=self._overlong.penalty_factor,
        )
        return Score(
            accuracy=score.accuracy,
            reward=score.reward + penalty,
            parts={**score.parts, "overlong": penalty},
            prediction=score.prediction,
        )


def unscorable() -> Score:
    """The verdict when there is none."""
    return Score(accuracy=math.nan, reward=math.nan, parts={}, prediction="")


class RewardPool:
    """All reward workers, seen from the driver. A group goes to a worker that is free."""

    def __init__(
        self,
        options: dict[str, Any],
        *,
        num_workers: int,
        functions: list[RewardFunctionConfig],
        overlong: OverlongBufferConfig,
        max_response_length: int,
        timeout_s: float,
    ) -> None:
        """options: Ray options of every worker, from `workers.cluster`."""
        worker: Any = ray.remote(RewardWorker)
        self._worker_class = worker.options(**options)
        self._arguments = (functions, overlong, max_response_length)
        self._workers = [self._worker_class.remote() for _ in range(num_workers)]
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._timeout_s = timeout_s
        self.respawned = 0
        self.unscorable_groups = 0

    async def start(self, start_timeout_s: float) -> None:
        """Waits until every worker has loaded the reward functions.

        Raises:
            RemoteError: a reward function cannot be loaded, and why.
        """
        refs = [worker.start.remote(*self._arguments) for worker in self._workers]
        await wait(refs, start_timeout_s, "the reward workers to start", "rollout.start_timeout_s")
        for index in range(len(self._workers)):
            self._free.put_nowait(index)

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> tuple[Score, ...]:
        """One score per response.

        Raises:
            RemoteError: a reward function raised; its error is not a verdict.
        """
        answers = [(response.text, len(response.token_ids)) for response in responses]
        for _ in range(2):
            index = await self._free.get()
            try:
                ref = self._workers[index].score.remote(prompt.source, prompt.ground_truth, prompt.extra_info, answers)
                return tuple(await asyncio.wait_for(ref, self._timeout_s))
            except (TimeoutError, GetTimeoutError, RayActorError):
                ray.kill(self._workers[index])
                self._workers[index] = self._worker_class.remote()
                self._workers[index].start.remote(*self._arguments)  # its calls run in order: the next one waits for it
                self.respawned += 1
            except ray.exceptions.RayTaskError as error:
                raise RemoteError(f"reward function failed on prompt {prompt.id}: {error.cause}") from error.cause
            finally:
                self._free.put_nowait(index)
        self.unscorable_groups += 1
        return tuple(unscorable() for _ in responses)

    def stop(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            ray.kill(worker)
