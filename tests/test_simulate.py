"""The buffer on a simulated fleet: dispatch close to an oracle's, little waste, no bias to short responses."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from dapo.buffer import COMPLETION
from dapo.policies import barrier, first_finished, refill, refill_in_rounds, streaming
from dapo.simulated_run import Plan
from dapo.simulation import Draws, Fleet, Workload


def make_plan(
    rate: float = 0.5, slots: int = 64, steps: int = 4, update: float = 0.0, sync: float = 0.0, **workload
) -> Plan:
    return Plan(workload=Workload(rate=rate, **workload), slots=slots, steps=steps, update=update, sync=sync)


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
    """Of the refill, the length of the last chain of rejections decides, which varies from step to step."""
    plan = make_plan(steps=16)
    own = later(streaming(plan).generation)
    assert own <= 0.75 * later(barrier(plan).generation)
    assert own <= 0.5 * later(refill(plan).generation)
    assert own <= 0.5 * later(refill_in_rounds(plan).generation)


@pytest.mark.parametrize("drift", [0.0, 0.02, -0.02])
@pytest.mark.parametrize(("rate", "slots"), [(0.28, 64), (0.5, 64), (0.5, 128), (0.9, 128)])
def test_staleness_keeps_the_engines_busy_and_wastes_next_to_nothing(rate, slots, drift):
    strict = streaming(make_plan(rate, slots, rate_drift=drift))
    generation = later(strict.generation) / 3
    plan = make_plan(rate, slots, steps=8, rate_drift=drift, update=0.43 * generation, sync=0.005 * generation)
    loose = streaming(plan, max_staleness=1)
    assert loose.idle <= 0.05 and loose.wasted <= 0.01
    assert 0 < loose.staleness <= 1
    trained = [index for step in loose.trained for index in step]
    assert trained == sorted(set(trained))


def test_staleness_1_trains_more_groups_per_second():
    generation = later(streaming(make_plan()).generation) / 3
    plan = make_plan(steps=8, update=0.43 * generation, sync=0.005 * generation)
    assert later(streaming(plan).steps) >= 1.3 * later(streaming(plan, max_staleness=1).steps)


def kolmogorov_smirnov(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
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
        pytest.param(lambda plan: streaming(plan, max_staleness=1), False, id="draw order, staleness 1"),
        pytest.param(lambda plan: streaming(plan, admission=COMPLETION), True, id="completion"),
        pytest.param(first_finished, True, id="first finished wins"),
    ],
)
def test_draw_order_is_not_biased_to_short_responses_and_completion_is(policy, biased):
    """Mean lengths of trained groups against those of all mixed groups drawn, finished or not."""
    plan = Plan(workload=Workload(rate=0.5, wrong_longer=1.5), batch=64, slots=128, steps=16)
    outcome = policy(plan)
    trained, drawn = outcome.trained_lengths, outcome.mixed_lengths
    distance, p = kolmogorov_smirnov(trained, drawn)
    bound = 1.63 * math.sqrt(1 / len(trained) + 1 / len(drawn))
    assert (p < 1e-6) if biased else (distance <= bound)


def test_the_fleet_queues_and_frees_slots():
    lengths = {0: (5, 9, 2, 7), 1: (4, 4, 4, 30), 2: (1, 20, 3, 8)}
    fleet = Fleet(engines=2, slots=4)
    for index, each in lengths.items():
        fleet.submit(index, each)
    assert fleet.in_flight == 12
    ends = {}
    while fleet.in_flight:
        finished = fleet.step()
        if finished is not None:
            ends[finished] = fleet.now
    # The third draw waits for the slots of the first engine: at 2, 5, 7, 9.
    assert ends == {0: 9, 1: 30, 2: 25}
    assert fleet.busy == sum(sum(each) for each in lengths.values())


def test_an_aborted_draw_frees_its_slots_for_those_that_wait():
    fleet = Fleet(engines=1, slots=4)
    fleet.submit(0, (5, 9, 2, 7))
    fleet.submit(1, (4, 4, 4, 4))
    fleet.step()
    assert fleet.abort([0]) == 4 * 2
    assert fleet.in_flight == 4
    while fleet.in_flight:
        fleet.step()
    assert fleet.now == 2 + 4


def test_a_draw_that_starts_again_at_a_later_version_gives_other_responses():
    draws = Draws(Workload(seed=3))
    assert draws.attempt(7, 0) == Draws(Workload(seed=3)).attempt(7, 0)
    assert draws.attempt(7, 0) != draws.attempt(7, 1) != draws.attempt(8, 1)
    mixed = [draws.attempt(index, 0).is_mixed for index in range(4000)]
    assert abs(np.mean(mixed) - 0.5) < 0.03
