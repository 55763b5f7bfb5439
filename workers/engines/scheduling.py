"""Schedules an engine's requests as vLLM does, and hands their log-probabilities on by the sixteen instead of singly.

vLLM loads this module in the engine's process, as `scheduler_cls`. It sends a token's log-probability, rank and number
as three arrays of one element: to read those is most of the work of the process that takes tokens from an engine, and
with many requests a GPU waits for it. Tokens are handed on at once, so that versions, stop strings, ends and signs of
life are as before. A request that is cut off may lack the log-probabilities of its last 15 tokens: they do not count.
"""

from collections import defaultdict
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

TOGETHER = 16  # rows: to read and keep one takes an eighth of the time, and with 64 rows a thirteenth


class Gathering:
    """Mixes into a scheduler of vLLM's. Requests with stop strings stay as they are: vLLM ends them where it reads."""

    requests: dict[str, Any]

    def __init__(self, **needs: Any) -> None:
        super().__init__(**needs)
        self._held: defaultdict[str, list[Any]] = defaultdict(list)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Returns what a step made, by the process that it goes to. See vLLM's `Scheduler`."""
        made: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for outputs in made.values():
            for output in outputs.outputs:
                if output.new_logprobs is not None:
                    self._gather(output)
        return made

    def _gather(self, output: Any) -> None:
        name = output.request_id
        held = self._held[name]
        held.append(output.new_logprobs)
        if self._goes_on(name, output) and len(held) < TOGETHER:
            output.new_logprobs = None
            return
        del self._held[name]
        if len(held) > 1:
            ids, logprobs, ranks, _ = zip(*held, strict=True)
            output.new_logprobs = LogprobsLists(np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks))

    def _goes_on(self, name: str, output: Any) -> bool:
        """Returns whether the rest of a request will pass through here: stop strings end it elsewhere."""
        request = self.requests.get(name)  # None for one that the same step has ended after this output
        return request is not None and output.finish_reason is None and not request.sampling_params.stop

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        """Ends requests that somebody else wants ended, and forgets what was held of them. See vLLM's `Scheduler`."""
        ended: list[Any] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in ended:
            self._held.pop(request.request_id, None)
        return ended


class GatheringScheduler(Gathering, Scheduler):
    """Schedules a step when the one before has ended."""


class GatheringAsyncScheduler(Gathering, AsyncScheduler):
    """Schedules a step while the one before is computed."""


def scheduler(**needs: Any) -> Gathering:
    """Returns the scheduler for an engine, of the kind that vLLM would have taken by itself."""
    ahead = needs["vllm_config"].scheduler_config.async_scheduling
    return (GatheringAsyncScheduler if ahead else GatheringScheduler)(**needs)
