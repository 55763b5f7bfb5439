"""Log-probabilities that an engine hands on by the sixteen: none is lost, moved or changed."""

import asyncio
from collections import Counter, defaultdict, deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dapo.types import Response
from tests.support.schedulers import needs
from tests.workers.test_rollout import PROMPT, group_of, sampling
from workers.engines.scheduling import TOGETHER, Gathering, scheduler
from workers.placement import vllm_environment


class Played:
    """Stands for vLLM's scheduler. Each step makes what it is told: rows of log-probabilities by request."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}

    def add(self, name: str, stop: list[str]) -> None:
        self.requests[name] = SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(stop=stop))

    def update_from_output(self, step: dict[str, tuple[int, str | None]], rows: Any) -> dict[int, Any]:
        made = []
        for name, (count, reason) in step.items():
            some = [next(rows) for _ in range(count)]
            column = np.array(some, dtype=np.float32).reshape(-1, 1)
            lists = LogprobsLists(column.astype(np.int32), column, column[:, 0].astype(np.int32)) if count else None
            output = SimpleNamespace(request_id=name, new_logprobs=lists, finish_reason=reason, rows=some)
            if reason is not None:
                del self.requests[name]
            made.append(output)
        return {0: SimpleNamespace(outputs=made)}

    def finish_requests(self, names: list[str], status: str) -> list[Any]:
        return [self.requests.pop(name) for name in names if name in self.requests]


class Scheduler(Gathering, Played):
    pass


STEPS = st.lists(st.integers(1, 3), min_size=1, max_size=80)  # rows of each


@given(st.lists(st.tuples(STEPS, st.booleans(), st.booleans()), min_size=1, max_size=4))
def test_whatever_ends_has_all_its_rows_in_order(requests: list[tuple[list[int], bool, bool]]) -> None:
    """Requests are (rows of each step, whether it has stop strings, whether it comes to its end). Several rows in one
    step are those of speculation."""
    gathering, rows = Scheduler(), iter(range(1, 10**6))
    made: dict[str, list[int]] = {f"r{number}": [] for number in range(len(requests))}
    came: dict[str, list[float]] = {name: [] for name in made}
    for name, (_, stops, _) in zip(made, requests, strict=True):
        gathering.add(name, ["###"] if stops else [])
    for turn in range(max(len(steps) for steps, _, _ in requests)):
        step: dict[str, tuple[int, str | None]] = {}
        for name, (steps, _, whole) in zip(made, requests, strict=True):
            if turn < len(steps):
                last = turn == len(steps) - 1
                step[name] = (steps[turn], "stop" if last and whole else None)
        [outputs] = gathering.update_from_output(step, rows).values()
        for output in outputs.outputs:
            name = output.request_id
            made[name] += output.rows
            if (lists := output.new_logprobs) is not None:
                assert lists.logprobs.shape == lists.logprob_token_ids.shape == (len(lists.sampled_token_ranks), 1)
                assert lists.logprobs[:, 0].tolist() == lists.logprob_token_ids[:, 0].tolist()
                assert lists.logprobs[:, 0].tolist() == lists.sampled_token_ranks.tolist()
                came[name] += lists.logprobs[:, 0].tolist()
            _, stops, _ = requests[int(name[1:])]
            assert came[name] == made[name][: len(came[name])]
            if output.finish_reason or stops:
                assert came[name] == made[name]
            assert len(made[name]) - len(came[name]) < 3 * TOGETHER
    left = [name for name, (_, _, whole) in zip(made, requests, strict=True) if not whole]
    gathering.finish_requests(left, "aborted")
    assert not gathering._held and not gathering.requests


def test_sixteen_steps_make_one_message() -> None:
    gathering, rows = Scheduler(), iter(range(1000))
    gathering.add("r", [])
    sizes = []
    for _ in range(3 * TOGETHER + 2):
        [outputs] = gathering.update_from_output({"r": (1, None)}, rows).values()
        if (lists := outputs.outputs[0].new_logprobs) is not None:
            sizes.append(len(lists.logprobs))
    [outputs] = gathering.update_from_output({"r": (1, "length")}, rows).values()
    assert sizes == 3 * [TOGETHER] and len(outputs.outputs[0].new_logprobs.logprobs) == 3


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "a step ahead, as on a GPU"])
def test_vllms_own_schedulers_with_steps_ahead_cache_that_runs_out_and_an_abort(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Rows are numbered in the order of the steps; requests that are put back for lack of cache lose none."""
    for name, value in vllm_environment("cpu", 1).items():
        monkeypatch.setenv(name, value)
    driven = Driven(ahead, blocks=12)  # of 16 tokens, one of them vLLM's; five requests want 16 or more in the end
    for number in range(5):
        driven.add(f"r{number}", tokens=40 + number)
    while driven.step():
        if driven.steps == 35:
            driven.scheduler.finish_requests("r1", RequestStatus.FINISHED_ABORTED)
    assert driven.preempted and not driven.scheduler._held
    assert sum(driven.rows["r1"], []) == driven.made["r1"][: 2 * TOGETHER] and len(driven.made["r1"]) > 2 * TOGETHER
    for number in (0, 2, 3, 4):
        made, rows = driven.made[f"r{number}"], driven.rows[f"r{number}"]
        assert [len(part) for part in rows] == [TOGETHER, TOGETHER, 8 + number]
        assert sum(rows, []) == made and len(made) == 40 + number


class Driven:
    """Drives a scheduler as an engine does, with a made-up model. made, rows: by request, the numbers of its rows as
    they were made, and as they were handed on."""

    def __init__(self, ahead: bool, blocks: int) -> None:
        self.scheduler: Any = scheduler(**needs(ahead=ahead, blocks=blocks, caching=False))
        assert isinstance(self.scheduler, AsyncScheduler) is ahead
        self.steps = self.preempted = self._numbers = 0
        self.made: dict[str, list[int]] = defaultdict(list)
        self.rows: dict[str, list[list[int]]] = defaultdict(list)
        self._queue: deque[Any] = deque()
        self._ahead = ahead

    def add(self, name: str, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True)
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


def listen(worker: Any) -> None:
    """Counts in an engine's front process what each request's messages bring."""
    processor = worker._engine.output_processor
    worker.heard, process = [], processor.process_outputs

    def processed(outputs: list[Any], *args: Any, **named: Any) -> Any:
        for each in outputs:
            rows = 0 if each.new_logprobs is None else len(each.new_logprobs.logprobs)
            worker.heard.append((each.request_id, len(each.new_token_ids), rows))
        return process(outputs, *args, **named)

    processor.process_outputs = processed


def heard(worker: Any) -> list[tuple[str, int, int]]:
    del worker._engine.output_processor.process_outputs
    return worker.heard


@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_a_real_engine_hands_on_each_token_at_once_and_log_probabilities_by_the_sixteen(
    two_engines, loop: asyncio.Runner
) -> None:
    pool, _ = two_engines.fresh()
    ray.get([worker.__ray_call__.remote(listen) for worker in pool.workers], timeout=60)
    responses = loop.run(group_of(pool, "by the sixteen", 50, 8, 100))
    told = [each for of in ray.get([w.__ray_call__.remote(heard) for w in pool.workers], timeout=60) for each in of]
    tokens, messages, rows = Counter[str](), Counter[str](), Counter[str]()
    for name, count, row in told:
        tokens[name] += count
        rows[name] += row
        messages[name] += row > 0
        assert count == 1 and row <= TOGETHER
    assert sorted(tokens.values()) == sorted(len(response.token_ids) for response in responses)
    assert rows == tokens and {name: -(-count // TOGETHER) for name, count in tokens.items()} == messages
    assert max(tokens.values()) > 2 * TOGETHER, "some are long enough to tell"


@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_a_real_engine_that_looks_for_stop_strings_hands_them_on_singly(two_engines, loop: asyncio.Runner) -> None:
    """It looks where tokens come in, and what has not come in by then would be missing."""
    pool, _ = two_engines.fresh()

    async def run() -> list[Any]:
        plain = {number: each async for number, each in pool.generate("plain", PROMPT, sampling(8, 100), range(60, 68))}
        longest = max(plain.values(), key=lambda response: len(response.token_ids))
        half = len(longest.text) // 2
        wanted = replace(sampling(8, 100), stop=(longest.text[half : half + 2],))
        stopped = {number: each async for number, each in pool.generate("stop", PROMPT, wanted, range(60, 68))}
        return [(plain[number], stopped[number]) for number in range(8)]

    cut = 0
    for plain, stopped in loop.run(run()):
        length = len(stopped.token_ids)
        cut += length < len(plain.token_ids)
        assert length == len(stopped.rollout_logprobs)
        np.testing.assert_array_equal(stopped.token_ids, plain.token_ids[:length])
        np.testing.assert_allclose(stopped.rollout_logprobs, plain.rollout_logprobs[:length], atol=1e-4)
    assert cut


@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_without_log_probabilities_the_tokens_are_the_same(two_engines, loop: asyncio.Runner) -> None:
    pool, _ = two_engines.fresh()

    async def unasked() -> dict[int, Response]:
        wanted = replace(sampling(), logprobs=False)
        return dict([each async for each in pool.generate("unasked", PROMPT, wanted, range(700, 704))])

    async def both() -> Any:
        return await asyncio.gather(group_of(pool, "asked", 700), unasked())  # in the same batches

    asked, found = loop.run(both())
    for sample, first in enumerate(asked):
        second = found[sample]
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        assert len(second.rollout_logprobs) == len(second.token_ids) and np.isnan(second.rollout_logprobs).all()
        assert (first.text, first.finish_reason) == (second.text, second.finish_reason)
        assert first.policy_versions == second.policy_versions
