"""The buffer on a simulated fleet: dispatch close to an oracle's, little waste, no bias to short responses."""

import heapq
import math

import numpy as np
import pytest

from dapo.buffer import COMPLETION
from dapo.policies import Plan, barrier, first_finished, refill, streaming
from dapo.simulation import Draws, Fleet, Workload


def make_plan(rate: float = 0.5, slots: int = 64, steps: int = 4, **workload) -> Plan:
    return Plan(workload=Workload(rate=rate, **workload), slots=slots, steps=steps)


def later(times: tuple[float, ...]) -> float:
    """Sum without the first step, whose mixed rate nobody knows."""
    return sum(times[1:])


@pytest.mark.parametrize("slots", [64, 128])
@pytest.mark.parametrize("rate", [0.28, 0.5, 0.9])
def test_streaming_is_as_fast_as_an_oracle_and_wastes_little(rate, slots):
    outcome = streaming(make_plan(rate, slots))
    assert later(outcome.generation) <= 1.05 * later(outcome.oracle)
    assert outcome.generation[0] <= 1.3 * outcome.oracle[0]
    assert outcome.wasted <= 0.05


@pytest.mark.parametrize("drift", [0.05, -0.05])
def test_it_follows_a_rate_that_drifts(drift):
    outcome = streaming(make_plan(0.5, steps=6, rate_drift=drift))
    assert later(outcome.generation) <= 1.05 * later(outcome.oracle)
    assert outcome.wasted <= 0.05


def test_it_beats_a_barrier_and_a_refill():
    plan = make_plan()
    own = later(streaming(plan).generation)
    assert own <= 0.75 * later(barrier(plan).generation)
    assert own <= 0.6 * later(refill(plan).generation)


def test_staleness_keeps_the_engines_busy_and_wastes_next_to_nothing():
    generation = sum(streaming(make_plan()).generation) / 4
    plan = Plan(workload=Workload(), steps=6, update=0.4 * generation, sync=0.01 * generation)
    strict, loose = streaming(plan), streaming(plan, max_staleness=1)
    assert later(strict.steps) >= 1.3 * later(loose.steps)
    assert loose.idle <= 0.05 and loose.wasted <= 0.01
    assert 0 < loose.staleness <= 1
    trained = [index for step in loose.trained for index in step]
    assert trained == sorted(set(trained))


def kolmogorov_smirnov(one: list[int], other: list[int]) -> tuple[float, float]:
    """Two-sample D and its asymptotic p value (Smirnov's series)."""
    left, right = np.sort(one), np.sort(other)
    at = np.union1d(left, right)
    shares = [np.searchsorted(lengths, at, side="right") / len(lengths) for lengths in (left, right)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    x = distance * math.sqrt(len(left) * len(right) / (len(left) + len(right)))
    p = 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
    return distance, min(1.0, max(0.0, p))


@pytest.mark.parametrize(
    ("policy", "biased"),
    [
        pytest.param(streaming, False, id="draw order"),
        pytest.param(lambda plan: streaming(plan, admission=COMPLETION), False, id="completion, the rest drawn again"),
        pytest.param(first_finished, True, id="first finished wins"),
    ],
)
def test_only_cutting_off_what_is_slow_favours_short_responses(policy, biased):
    """Mean lengths of trained groups against those of all mixed groups drawn, finished or not."""
    plan = Plan(workload=Workload(rate=0.5, wrong_longer=1.5), batch=64, slots=128, steps=16)
    outcome = policy(plan)
    draws = Draws(plan.workload)
    draws.reach(max(outcome.started))
    trained = [draws.tokens(index) for step in outcome.trained for index in step]
    drawn = [draws.tokens(index) for index in outcome.started if draws.is_mixed(index)]
    distance, p = kolmogorov_smirnov(trained, drawn)
    bound = 1.63 * math.sqrt(1 / len(trained) + 1 / len(drawn))
    assert (p < 1e-6) if biased else (distance <= bound)


def test_the_fleet_queues_and_frees_slots():
    draws = Draws(Workload(n=4, seed=3))
    fleet = Fleet(draws, engines=2, slots=4)
    for index in range(3):
        fleet.submit(index)
    assert fleet.in_flight == 12
    lengths = draws.lengths
    ends = []
    while fleet.in_flight:
        finished = fleet.step()
        if finished is not None:
            ends.append((fleet.now, finished))
    assert {index for _, index in ends} == {0, 1, 2}
    slots, expected = (
        [0.0] * 4,
        0.0,
    )  # the third draw waits for the first engine, whose queue is as short as the other's
    for length in lengths[0] + lengths[2]:
        heapq.heapify(slots)
        end = heapq.heappop(slots) + length
        slots.append(end)
        expected = max(expected, end) if length in lengths[2] else expected
    assert dict((index, now) for now, index in ends) == {
        0: max(lengths[0]),
        1: max(lengths[1]),
        2: expected,
    }
    assert fleet.busy == sum(sum(lengths[index]) for index in range(3))


def test_an_aborted_draw_frees_its_slots_for_those_that_wait():
    draws = Draws(Workload(n=4, seed=3))
    fleet = Fleet(draws, engines=1, slots=4)
    fleet.submit(0)
    fleet.submit(1)
    fleet.step()
    partial = fleet.abort([0])
    shortest = min(draws.lengths[0])
    assert partial == shortest * 4 or partial == shortest + 3 * shortest
    assert fleet.in_flight == 4
    while fleet.in_flight:
        fleet.step()
    assert fleet.now == shortest + max(draws.lengths[1])
