"""Log-probabilities that an engine hands on by the sixteen: none is lost, moved or changed, nor by an abort."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as OwnScheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dapo.workers.engines.scheduling import TOGETHER, scheduler
from dapo.workers.placement import vllm_environment
from tests.support.schedulers import needs

ABORT, LENGTH = FinishReason.ABORT, FinishReason.LENGTH


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in vllm_environment("cpu", 1).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "a step ahead, as on a GPU"])
def test_vllms_own_schedulers_with_steps_ahead_and_cache_that_runs_out(ahead: bool) -> None:
    """Rows are numbered in the order of the steps; requests that are put back for lack of cache lose none."""
    driven, plain = Driven(scheduler, ahead), Driven(AsyncScheduler if ahead else OwnScheduler, ahead)
    for each in (driven, plain):
        for number in range(5):
            each.add(f"r{number}", tokens=40 + number)
        each.add("stops", tokens=20, stop=["###"])
        while each.step():
            pass
    assert isinstance(driven.scheduler, AsyncScheduler) is ahead
    assert driven.preempted == plain.preempted > 0 and driven.made == plain.made, "it decides as vLLM's own does"
    assert not driven.scheduler._held
    assert driven.rows["stops"] == [[number] for number in driven.made["stops"]], "vLLM looks where it reads"
    for number in range(5):
        made, rows = driven.made[f"r{number}"], driven.rows[f"r{number}"]
        assert [len(part) for part in rows] == [TOGETHER, TOGETHER, 8 + number]
        assert sum(rows, []) == made and len(made) == 40 + number


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "a step ahead, as on a GPU"])
def test_an_aborted_request_ends_with_all_tokens_that_were_computed(ahead: bool) -> None:
    """Aborts at every fourth step, of requests that are computed, wait for cache, or are at their last token."""
    driven = Driven(scheduler, ahead)
    for number in range(30):
        driven.add(f"r{number}", tokens=36 + number % 5)
    while driven.step(abort=[] if driven.steps % 4 else [f"r{driven.steps * 7 % 30}", f"r{driven.steps // 8}"]):
        pass
    assert driven.computed == driven.made and driven.preempted > 0
    assert driven.made == {name: sum(rows, []) for name, rows in driven.rows.items()}
    whole = [len(driven.made[f"r{number}"]) == 36 + number % 5 for number in range(30)]
    assert driven.ends == {f"r{number}": LENGTH if whole[number] else ABORT for number in range(30)}
    assert 3 < sum(whole) < 27 and not driven.scheduler.requests
    assert not (driven.scheduler._held or driven.scheduler._aborted or driven.scheduler._shortened)


class Driven:
    """Drives a scheduler as an engine does, with a made-up model. computed, made, rows: by request, the numbers of its
    rows as they were computed, as their tokens were handed on, and as they were. ends: why requests ended."""

    def __init__(self, kind: Any, ahead: bool) -> None:
        # 12 blocks of 16 tokens, one of them vLLM's; five requests want 16 or more in the end
        self.scheduler: Any = kind(**needs(ahead=ahead, blocks=12, caching=False))
        self.steps = self.preempted = self._numbers = 0
        self.made: dict[str, list[int]] = defaultdict(list)
        self.computed: dict[str, list[int]] = defaultdict(list)
        self.rows: dict[str, list[list[int]]] = defaultdict(list)
        self.ends: dict[str, FinishReason] = {}
        self._queue: deque[Any] = deque()
        self._ahead = ahead

    def add(self, name: str, tokens: int, stop: Sequence[str] = ()) -> None:
        params = SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True, stop=[*stop])
        self.scheduler.add_request(Request(name, [1, 2, 3, 4], params, None))

    def step(self, abort: Sequence[str] = ()) -> bool:
        """Returns whether there was something left to do. abort: requests to abort while the step is computed."""
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
        for name, number in zip(names, numbers.tolist(), strict=True):
            self.computed[name].append(number)
        if abort:
            self.scheduler.finish_requests(abort, RequestStatus.FINISHED_ABORTED)
        for outputs in self.scheduler.update_from_output(step, output).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self.ends[each.request_id] = each.finish_reason
                if each.new_token_ids:
                    self.made[each.request_id].append(int(numbers[places[each.request_id]]))
                if each.new_logprobs is not None:
                    self.rows[each.request_id].append(each.new_logprobs.logprobs[:, 0].astype(int).tolist())
        return True
