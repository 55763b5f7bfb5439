"""How many responses the engines run at once, against a simulated engine whose cache is counted token by token."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.workers.capacity import EngineSize, FleetCapacity
from dapo.workers.engines.worker import size_of

WINDOW = 1100  # prompt and response together
Lengths = tuple[int, int]  # prompt, response


def size(kv_tokens: int, sequences: int = 10**6, window: int = WINDOW) -> EngineSize:
    return EngineSize(sequences=sequences, kv_tokens=kv_tokens, window=window)


@pytest.mark.parametrize(("active", "expected"), [(None, 128), (48, 48)])
def test_an_engine_runs_as_many_as_its_scheduler_admits(active: int | None, expected: int) -> None:
    """Fewer than it has places for where `max_num_active_seqs` says so."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=128, max_num_active_seqs=active),
        cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
        model_config=SimpleNamespace(max_model_len=WINDOW),
    )
    said = size_of(config, [7, 5])
    assert said == EngineSize(sequences=expected, kv_tokens=160, window=WINDOW, cache_bytes=5)


def cache_use(fleet: FleetCapacity, draw: Callable[[], Lengths], ticks: int, warm_up: int) -> float:
    """Mean number of tokens in the cache of an engine that always runs as many responses as the fleet says.

    Every tick adds a token to each running response; one that has all of its own ends, and another takes its place.
    """
    running: list[list[int]] = []  # prompt, response, tokens so far
    held = []
    for _ in range(ticks):
        while len(running) < fleet.responses:
            running.append([*draw(), 0])
        for each in running:
            each[2] += 1
        held.append(sum(prompt + tokens for prompt, _, tokens in running))
        for prompt, response, _ in [each for each in running if each[2] == each[1]]:
            fleet.observe(prompt, response)
        running = [each for each in running if each[2] < each[1]]
    return float(np.mean(held[warm_up:]))


LENGTHS: dict[str, Callable[[np.random.Generator], Lengths]] = {
    "constant": lambda rng: (50, 200),
    "uniform": lambda rng: (int(rng.integers(10, 100)), int(rng.integers(1, 400))),
    "long-tailed": lambda rng: (40, int(np.clip(rng.lognormal(np.log(100), 0.9), 1, 1000))),
    "long-prompts-have-long-answers": lambda rng: (200, 300) if rng.random() < 0.3 else (10, 20),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_responses_that_it_names_fill_the_cache(lengths):
    rng = np.random.default_rng(0)
    used = cache_use(FleetCapacity([size(12_000)]), lambda: lengths(rng), ticks=6000, warm_up=2000)
    assert used == pytest.approx(12_000, rel=0.04)


@pytest.mark.parametrize(("before", "after"), [(100, 800), (800, 100)])
def test_follows_lengths_that_drift(before, after):
    fleet = FleetCapacity([size(1_000_000)])
    for response in [before] * 8000 + [after] * 8000:
        fleet.observe(20, response)
    assert fleet.responses == pytest.approx(1_000_000 / (20 + after / 2), rel=0.03)


def test_before_the_first_response_every_one_fills_the_window():
    assert FleetCapacity([size(10_000, window=1000)]).responses == 20


BOUNDS = {
    "cache-not-known": ([size(0, sequences=64)], 64),
    "sequences-are-the-bound": ([size(100_000_000, sequences=64)], 64),
    "cache-smaller-than-one-response": ([size(10, sequences=64)], 1),
    "sum-over-engines": ([size(1210), size(130), size(10), size(0, sequences=7)], 10 + 1 + 1 + 7),
    "no-engine-yet": ([], 0),
}


@pytest.mark.parametrize(("engines", "expected"), BOUNDS.values(), ids=BOUNDS)
def test_bounds_of_each_engine(engines, expected):
    fleet = FleetCapacity(engines)
    for _ in range(20_000):
        fleet.observe(70, 100)  # 120 tokens in the mean
    assert fleet.responses == expected


SIZES = st.builds(
    EngineSize, sequences=st.integers(1, 512), kv_tokens=st.integers(0, 10**7), window=st.integers(1, 32768)
)


@given(
    engines=st.lists(SIZES, max_size=4),
    seen=st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 32768)), max_size=50),
)
def test_at_least_one_response_per_engine_and_never_more_than_its_sequences(engines, seen):
    fleet = FleetCapacity(engines)
    for prompt, response in seen:
        fleet.observe(prompt, response)
        assert len(engines) <= fleet.responses <= sum(engine.sequences for engine in engines)
