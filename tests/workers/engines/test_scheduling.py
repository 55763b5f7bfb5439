"""Log-probabilities that an engine hands on by the sixteen: none is lost, moved or changed."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as OwnScheduler
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dapo.workers.engines.scheduling import TOGETHER, scheduler
from dapo.workers.placement import vllm_environment
from tests.support.schedulers import needs


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "a step ahead, as on a GPU"])
def test_vllms_own_schedulers_with_steps_ahead_cache_that_runs_out_and_an_abort(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Rows are numbered in the order of the steps; requests that are put back for lack of cache lose none."""
    for name, value in vllm_environment("cpu", 1).items():
        monkeypatch.setenv(name, value)
    driven, plain = Driven(scheduler, ahead), Driven(AsyncScheduler if ahead else OwnScheduler, ahead)
    for each in (driven, plain):
        for number in range(5):
            each.add(f"r{number}", tokens=40 + number)
        each.add("stops", tokens=20, stop=["###"])
        while each.step():
            if each.steps == 35:
                each.scheduler.finish_requests("r1", RequestStatus.FINISHED_ABORTED)
    assert isinstance(driven.scheduler, AsyncScheduler) is ahead
    assert driven.preempted == plain.preempted > 0 and driven.made == plain.made, "it decides as vLLM's own does"
    assert not driven.scheduler._held
    assert sum(driven.rows["r1"], []) == driven.made["r1"][: 2 * TOGETHER] and len(driven.made["r1"]) > 2 * TOGETHER
    assert driven.rows["stops"] == [[number] for number in driven.made["stops"]], "vLLM looks where it reads"
    for number in (0, 2, 3, 4):
        made, rows = driven.made[f"r{number}"], driven.rows[f"r{number}"]
        assert [len(part) for part in rows] == [TOGETHER, TOGETHER, 8 + number]
        assert sum(rows, []) == made and len(made) == 40 + number


class Driven:
    """Drives a scheduler as an engine does, with a made-up model. made, rows: by request, the numbers of its rows as
    they were made, and as they were handed on."""

    def __init__(self, kind: Any, ahead: bool) -> None:
        # 12 blocks of 16 tokens, one of them vLLM's; five requests want 16 or more in the end
        self.scheduler: Any = kind(**needs(ahead=ahead, blocks=12, caching=False))
        self.steps = self.preempted = self._numbers = 0
        self.made: dict[str, list[int]] = defaultdict(list)
        self.rows: dict[str, list[list[int]]] = defaultdict(list)
        self._queue: deque[Any] = deque()
        self._ahead = ahead

    def add(self, name: str, tokens: int, stop: Sequence[str] = ()) -> None:
        params = SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True, stop=[*stop])
        self.scheduler.add_request(Request(name, [1, 2, 3, 4], params, None))

    def step(self) -> bool:
        """Returns whether there was something left to do."""
        while len(self._queue) < 1 + self._ahead and self.scheduler.has_requests():
            self._queue.append(self.scheduler.schedule())
            self.preempted += len(self._queue[-1].preempted_req_ids or ())
        if not self._queue:
            return False
        self.steps += 1
        step = self._queue.popleft()
        names = list(step.num_scheduled_tokens)
        numbers = np.arange(self._numbers, self._numbers + len(names), dtype=np.int32)
        self._numbers += len(names)
        lists = LogprobsLists(numbers[:, None], numbers[:, None].astype(np.float32), numbers)
        places = {name: place for place, name in enumerate(names)}
        output = ModelRunnerOutput(names, places, sampled_token_ids=[[7] for _ in names], logprobs=lists)
        for outputs in self.scheduler.update_from_output(step, output).values():
            for each in outputs.outputs:
                self.made[each.request_id] += [int(numbers[places[each.request_id]])] * len(each.new_token_ids)
                if each.new_logprobs is not None:
                    self.rows[each.request_id].append(each.new_logprobs.logprobs[:, 0].astype(int).tolist())
        return True
