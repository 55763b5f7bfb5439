"""What engines and reward workers tell of themselves becomes metrics on the driver. The statistics are vLLM's own."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dapo.config.reward import OverlongBufferConfig, RewardConfig
from dapo.workers import reward
from dapo.workers.engines.life import LifeSigns, Statistics
from dapo.workers.engines.load import EngineMeter, Follower, engine_metrics
from dapo.workers.scoring.verdict import Verdict
from tests.support.fakes import make_prompt, make_response, make_score
from tests.support.report.reference import undocumented


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def scheduled(running: int, waiting: int = 0, kv: float = 0.0) -> SchedulerStats:
    return SchedulerStats(
        num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=1, kv_cache_usage=kv
    )


def computed(tokens: int, preempted: int = 0) -> IterationStats:
    """A step that gave as many tokens, each to another request, and put back the first `preempted` of them."""
    iteration = IterationStats()
    for number in range(tokens):
        events = [EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED)] if number < preempted else None
        output: Any = SimpleNamespace(request_id=str(number), new_token_ids=[7], events=events, num_nans_in_logits=0)
        iteration.update_from_output(output, 1.0, False, RequestStateStats(), LoRARequestStates(), None)
    return iteration


def test_counts_are_integrals_of_what_vllm_says_of_each_step() -> None:
    clock = Clock()
    meter = EngineMeter(clock)
    clock.now += 10
    meter.step(scheduled(4, waiting=2, kv=0.5), None)
    clock.now += 2
    meter.step(scheduled(3, kv=0.75), computed(4, preempted=1))
    meter.step(None, computed(3))
    clock.now += 2
    meter.step(scheduled(0), None)
    clock.now += 6
    counts = meter.read()
    assert (counts.seconds, counts.tokens, counts.preemptions, counts.busy_s) == (20.0, 7, 1, 4.0)
    assert (counts.running_s, counts.waiting_s, counts.kv_s) == (4 * 2 + 3 * 2, 3 * 2 + 1 * 2 + 1 * 6, 2.5)
    assert (counts.kv_peak, meter.read().kv_peak) == (0.75, 0.0)
    assert counts.resident_bytes > 10e6


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_weight_sync_pauses_waits_and_is_no_preemption(kept) -> None:
    clock = Clock()
    meter = EngineMeter(clock)
    meter.step(scheduled(5, kv=0.5), None)
    meter.hold(kept)
    clock.now += 3
    held = meter.read()
    assert (held.busy_s, held.running_s, held.kv_s, held.waiting_s) == (0.0, 0.0, 1.5 * kept, 18.0)
    # vLLM tells of them with their next token; one is for its cache
    meter.step(scheduled(5), computed(6, preempted=1 if kept else 6))
    assert meter.read().preemptions == 1
    meter.step(scheduled(5), computed(5, preempted=2))
    assert meter.read().preemptions == 3


def test_the_driver_takes_what_came_between_two_laps_and_the_speed_of_the_last_seconds() -> None:
    clock, follower, drafts = Clock(), Follower(), SpecDecodingStats.new(4)
    drafts.observe_draft(num_draft_tokens=4, num_accepted_tokens=3)
    drafts.observe_draft(num_draft_tokens=2, num_accepted_tokens=0)
    meter = EngineMeter(clock)

    def after(seconds: float) -> None:
        clock.now += seconds
        follower.heard(meter.read())

    assert follower.lap() is None and follower.tokens_per_s() == 0.0
    after(1)
    assert follower.lap() is None, "a first sign of life is where it begins"
    meter.step(scheduled(2, kv=0.9), computed(10))
    after(4)
    meter.step(replace(scheduled(1, kv=0.2), spec_decoding_stats=drafts), computed(30))
    after(4)
    lap = follower.lap()
    assert lap is not None and (lap.drafts, lap.drafted, lap.accepted) == (2, 6, 3)
    assert (lap.seconds, lap.tokens, lap.running_s, lap.kv_peak) == (8.0, 40, 2 * 4 + 1 * 4, 0.9)
    assert follower.tokens_per_s() == 30 / 4
    assert follower.lap() is None, "nothing was heard since"
    after(2)
    again = follower.lap()
    assert again is not None and (again.seconds, again.tokens, again.running_s, again.kv_peak) == (2.0, 0, 2.0, 0.2)
    assert follower.tokens_per_s() == 0.0


def test_metrics_of_two_engines_are_sums_means_and_the_greatest() -> None:
    first = replace(
        EngineMeter().read(),
        **{"seconds": 10.0, "tokens": 1000, "preemptions": 2, "busy_s": 8.0, "running_s": 40.0, "waiting_s": 5.0},
        **{"kv_s": 4.0, "kv_peak": 0.7, "resident_bytes": 100, "drafts": 6, "drafted": 18, "accepted": 9},
    )
    second = replace(first, seconds=20.0, kv_peak=0.6, resident_bytes=300, drafts=0, drafted=0, accepted=0)
    expected = {
        "perf/engine/tokens_per_s": 150.0,
        "perf/engine/0/tokens_per_s": 100.0,
        "perf/engine/3/tokens_per_s": 50.0,
        "perf/engine/running_mean": 6.0,
        "perf/engine/waiting_mean": 0.75,
        "perf/engine/kv_use_mean": (0.4 + 0.2) / 2,
        "perf/engine/kv_use_max": 0.7,
        "perf/engine/preemptions": 4.0,
        "perf/engine/idle": 1 - (0.8 + 0.4) / 2,
        "perf/engine/resident_bytes": 300.0,
        "perf/engine/draft_acceptance": 0.5,
        "perf/engine/tokens_per_draft": 2.5,
    }
    assert engine_metrics({0: first, 3: second}, 0) == pytest.approx(expected)
    on_gpus = engine_metrics({0: first, 3: second}, 4)
    assert on_gpus == pytest.approx(expected | {"perf/engine/tokens_per_s_per_gpu": 150 / 8})
    assert undocumented(on_gpus) == [] and engine_metrics({}, 4) == {}


def test_vllm_calls_nothing_that_our_logger_lacks() -> None:
    signs = LifeSigns()
    statistics = Statistics(signs)
    assert all(callable(getattr(statistics, name)) for name in vars(StatLoggerBase) if not name.startswith("_"))
    statistics.record(scheduled(1), computed(3), mm_cache_stats=None, engine_idx=0)
    assert signs.meter.read().tokens == 3


class HalfASecond:
    """Stands for two workers of two children each, which take half a second for every response."""

    workers = SimpleNamespace(restarts=1)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.clock = Clock()

    async def score(self, item: Any, avoid: int = -1) -> tuple[Verdict, int]:
        await asyncio.sleep(0)
        self.clock.now += 0.5
        return Verdict(score=make_score(1.0), detail="", cpu_s=0.5, wall_s=0.5), 0

    async def check(self) -> list[tuple[int, int]]:
        return [(1, 500), (2, 300)]


def test_reward_workers_have_a_queue_and_idle_when_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "Fleet", HalfASecond)
    cfg = RewardConfig(num_workers=2, overlong_buffer=OverlongBufferConfig(enable=False))
    pool = reward.RewardPool({}, cfg, max_response_length=20)
    clock = pool.fleet.clock  # type: ignore[attr-defined]
    monkeypatch.setattr(reward, "time", SimpleNamespace(monotonic=clock))
    pool.unscored, pool._lapped = reward.Level(clock), clock()

    async def four() -> None:
        await asyncio.gather(*[pool.score(make_prompt(1), k, make_response(3)) for k in range(4)])
        await pool.check()

    asyncio.run(four())
    clock.now += 6.0  # in which nothing is scored
    found = pool.lap()
    assert found == {
        "perf/restarted_reward_workers": 1,
        "perf/restarted_reward_children": 3,
        "perf/reward/queue_mean": (4 + 3 + 2 + 1) * 0.5 / 8.0,
        "perf/reward/queue_max": 4.0,
        "perf/reward/idle": 1 - 4 * 0.5 / (8.0 * 4),
        "perf/reward/resident_bytes": 500,
    }
    assert undocumented(found) == []
    clock.now += 1.0
    again = pool.lap()
    assert [again[f"perf/reward/{name}"] for name in ("queue_mean", "queue_max", "idle")] == [0.0, 0.0, 1.0]
