"""A vLLM scheduler that forwards log-probabilities, and experts, in batches of 16 tokens instead of one by one.

vLLM loads this in the engine's process as `scheduler_cls`. vLLM sends log-probability, rank and token id of each token
as three one-element arrays. Reading those is most of the work of the process that receives the tokens, and with many
requests a GPU waits for it. Tokens themselves are forwarded at once, so versions, stop strings, ends and health checks
are unchanged.

An aborted request ends with its next output, and loses no token: neither those that are held back here nor those of the
step under way. vLLM's own schedulers end it at once.
"""

from collections import defaultdict
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from dapo.types import LEAST_LOGPROB

TOGETHER = 16  # rows: a row then takes 1/8 of the time to read and keep; with 64 rows 1/13


class Gathering:
    """Mixin for vLLM's schedulers. Requests with stop strings are not batched: vLLM ends them in the receiver."""

    requests: dict[str, Any]
    max_model_len: int

    def __init__(self, **needs: Any) -> None:
        super().__init__(**needs)
        self._held: defaultdict[str, list[Any]] = defaultdict(list)
        self._aborted: set[str] = set()  # to be ended after the step under way
        self._shortened: set[str] = set()  # to end with the step after it, which computes their last tokens

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        made: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for outputs in made.values():
            for output in outputs.outputs:
                if output.request_id in self._shortened and output.finish_reason is not None:
                    self._shortened.discard(output.request_id)
                    if output.finish_reason == FinishReason.LENGTH:
                        output.finish_reason = FinishReason.ABORT
                if output.new_logprobs is not None:
                    self._gather(output)
        if self._aborted:
            self._end(made)
        return made

    def _end(self, made: dict[int, Any]) -> None:
        """Ends the aborted requests. made: gets their last outputs."""
        for request in filter(None, map(self.requests.get, self._aborted)):
            if request.num_output_placeholders:  # the next step already computes tokens of it
                last = request.num_output_tokens + request.num_output_placeholders
                if last < min(request.max_tokens, self.max_model_len - request.num_prompt_tokens):
                    request.max_tokens = last
                    self._shortened.add(request.request_id)
                continue
            super().finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)  # type: ignore[misc]
            self._shortened.discard(request.request_id)
            output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
            if held := self._held.pop(request.request_id, []):
                output.new_logprobs, output.routed_experts = _together(held)
            made.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        self._aborted.clear()

    def _gather(self, output: Any) -> None:
        name = output.request_id
        held = self._held[name]
        held.append((output.new_logprobs, output.routed_experts))
        if self._goes_on(name, output) and len(held) < TOGETHER:
            output.new_logprobs = output.routed_experts = None
            return
        del self._held[name]
        if len(held) > 1 or output.new_logprobs.logprobs.shape[1] > 1:
            output.new_logprobs, output.routed_experts = _together(held)

    def _goes_on(self, name: str, output: Any) -> bool:
        """Whether later outputs of a request will pass through here. Stop strings end a request elsewhere."""
        request = self.requests.get(name)  # None if the same step ended it after this output
        return request is not None and output.finish_reason is None and not request.sampling_params.stop

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        """Also drops what was held for these requests. Named ones are aborted at the end of the step."""
        if request_ids is not None and finished_status == RequestStatus.FINISHED_ABORTED:
            names = {request_ids} if isinstance(request_ids, str) else set(request_ids)
            self._aborted |= names & self.requests.keys()
            return []
        ended: list[Any] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in ended:
            self._held.pop(request.request_id, None)
            self._shortened.discard(request.request_id)
        return ended


def _together(held: list[Any]) -> tuple[LogprobsLists, Any]:
    """held: log-probabilities and experts of the steps."""
    ids, logprobs, ranks, _ = zip(*(lists for lists, _ in held), strict=True)
    # A step has as many columns as the request of its batch that asks for most, and in those that could not be sampled
    # -inf, at the end of a row.
    width = min(part.shape[1] for part in ids)
    ids, logprobs = (np.concatenate([part[:, :width] for part in parts]) for parts in (ids, logprobs))
    width = (logprobs >= LEAST_LOGPROB).sum(axis=1).max(initial=1)
    experts = [rows for _, rows in held if rows is not None]
    return (
        LogprobsLists(ids[:, :width], logprobs[:, :width], np.concatenate(ranks)),
        np.concatenate(experts) if experts else None,
    )


class GatheringScheduler(Gathering, Scheduler): ...


class GatheringAsyncScheduler(Gathering, AsyncScheduler): ...


def scheduler(**needs: Any) -> Gathering:
    """Returns the scheduler of the kind that vLLM itself would choose."""
    ahead = needs["vllm_config"].scheduler_config.async_scheduling
    return (GatheringAsyncScheduler if ahead else GatheringScheduler)(**needs)


def scheduler_with_experts(**needs: Any) -> Gathering:
    """Returns one that forwards the experts of a CPU's model runner (`workers.engines.extension`)."""
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    made: Any = scheduler(**needs)
    made.aux_output_connector = AuxOutputSchedulerConnector()
    return made
