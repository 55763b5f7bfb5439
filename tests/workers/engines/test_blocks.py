"""A keeper of KV blocks that is spared needless work decides as vLLM's own does."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.support.schedulers import BLOCK, needs
from workers.engines import blocks as spared
from workers.engines.scheduling import scheduler
from workers.placement import vllm_environment

PROMPT = [*range(3, 43)]
TEXTS = 8  # different tokens, so that prompts and responses of several requests begin alike


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in vllm_environment("cpu", 1).items():
        monkeypatch.setenv(name, value)
    init_none_hash(sha256)


class Side:
    """One scheduler with a made-up model, driven as an engine does."""

    def __init__(self, made: Any, ahead: bool) -> None:
        self.scheduler = made
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self._ahead = ahead
        self._queue: deque[Any] = deque()

    def add(self, name: str, prompt: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, PROMPT[:prompt], params, None, block_hasher=self.hasher))

    def step(self) -> list[Any]:
        """What was decided and what is kept: scheduled tokens, new blocks, who was put back, whose blocks are which,
        what the prefix cache has, and which blocks are free, in their order."""
        seen: list[Any] = []
        while len(self._queue) < 1 + self._ahead and self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self._queue.append(step)
            seen += [step.num_scheduled_tokens, [(new.req_id, new.block_ids) for new in step.scheduled_new_reqs]]
            seen += [step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.new_block_ids]
            seen += [sorted(step.preempted_req_ids or ())]
        if self._queue:
            self._compute(self._queue.popleft())
        keeper = self.scheduler.kv_cache_manager
        pool = keeper.block_pool
        for kind in keeper.coordinator.single_type_managers:
            seen += [{name: [block.block_id for block in held] for name, held in kind.req_to_blocks.items() if held}]
            seen += [dict(kind.num_cached_block)]
        seen += [[(block.block_id, block.ref_cnt, block.block_hash) for block in pool.blocks]]
        return [*seen, [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]]

    def _compute(self, step: Any) -> None:
        names = list(step.num_scheduled_tokens)
        tokens = []
        for name in names:  # the text goes on by its own length, whoever asks; a prompt that is not through gives none
            request = self.scheduler.requests.get(name)
            through = request is not None and not request.is_prefill_chunk
            tokens.append([50 + request.num_output_tokens % TEXTS] if request is not None and through else [])
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(step, ModelRunnerOutput(names, places, sampled_token_ids=tokens))


REQUESTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 24), st.none() | st.integers(1, 30)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "a step ahead, as on a GPU"])
@pytest.mark.parametrize("caching", [False, True], ids=["no prefix cache", "prefix cache"])
@given(requests=REQUESTS, blocks=st.integers(5, 12))
@settings(max_examples=40)
def test_every_decision_and_every_block_is_the_same(
    requests: list[tuple[int, int, int, int | None]], blocks: int, ahead: bool, caching: bool
) -> None:
    """Requests are (step at which one comes, tokens of its prompt, of its response, steps until it is aborted)."""
    own = (AsyncScheduler if ahead else Scheduler)(**needs(ahead=ahead, blocks=blocks, caching=caching))
    sides = [Side(own, ahead), Side(scheduler(**needs(ahead=ahead, blocks=blocks, caching=caching)), ahead)]
    for number in range(400):
        for name, (comes, prompt, tokens, life) in enumerate(requests):
            for side in sides:
                if number == comes:
                    side.add(f"r{name}", prompt, tokens)
                if life is not None and number == comes + life and f"r{name}" in side.scheduler.requests:
                    side.scheduler.finish_requests(f"r{name}", RequestStatus.FINISHED_ABORTED)
        theirs, ours = (side.step() for side in sides)
        assert ours == theirs
        if number > 60 and not any(side.scheduler.has_requests() for side in sides):
            return
    raise AssertionError("they do not end")


@pytest.mark.parametrize("ahead", [False, True])
def test_vllm_is_asked_for_one_token_in_a_block(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    asked = []

    def counting(keeper: Any) -> None:
        for owner, name in ((keeper, "allocate_slots"), (keeper.coordinator, "cache_blocks")):
            own = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a, own=own, name=name, **k: (asked.append(name), own(*a, **k))[1])
        spared.spare(keeper)

    monkeypatch.setattr("workers.engines.scheduling.spare", counting)
    side = Side(scheduler(**needs(ahead=ahead, blocks=16, caching=True)), ahead)
    side.add("r", 8, 48)
    while side.scheduler.has_requests():
        side.step()
    assert asked.count("allocate_slots") == 4  # 55 tokens with keys and values
    assert 3 <= asked.count("cache_blocks") <= 4


def test_whoever_asks_for_more_than_slots_asks_vllm() -> None:
    side = Side(scheduler(**needs(ahead=False, blocks=16, caching=True)), ahead=False)
    side.add("r", 8, 48)
    side.step()
    keeper, request = side.scheduler.kv_cache_manager, side.scheduler.requests["r"]
    assert keeper.allocate_slots(request, 1) is keeper.empty_kv_cache_blocks
    assert keeper.allocate_slots(request, 1, reserved_blocks=1000) is None
    with pytest.raises(ValueError, match="num_new_tokens must be greater than 0"):
        keeper.allocate_slots(request, 0)


def test_what_has_layers_of_several_kinds_stays_as_it_is() -> None:
    made = scheduler(**needs(ahead=False, blocks=16, caching=False, groups=2))
    keeper = made.kv_cache_manager
    assert len(keeper.coordinator.single_type_managers) == 2
    assert "allocate_slots" not in vars(keeper) and "cache_blocks" not in vars(keeper.coordinator)
