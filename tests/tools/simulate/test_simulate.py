"""The buffer on a simulated fleet: dispatch close to an oracle's, little waste, no bias to short responses."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dapo.tools.simulate.fleet import ALWAYS, Fleet, Preemption, Workload
from dapo.tools.simulate.strategies import Scenario, Simulation, barrier, first_finished, streaming


def make_scenario(
    rate: float = 0.5, slots: int = 32, steps: int = 4, update: float = 0.0, sync: float = 0.0, engines: int = 8, **of
) -> Scenario:
    """32 groups of 8 an update for each engine: slots and draws in flight stand to the batch as with 512 groups of 16
    on 16 engines and twice the slots, at a quarter of the cost."""
    workload = Workload(rate=rate, n=8, **of)
    return Scenario(
        workload=workload, engines=engines, batch=32 * engines, slots=slots, steps=steps, update=update, sync=sync
    )


@functools.cache
def streamed(scenario: Scenario, max_staleness: int = 0) -> Simulation:
    return streaming(scenario, max_staleness=max_staleness)


def later(times: tuple[float, ...]) -> float:
    """Sum without the first step, whose mixed rate nobody knows."""
    return sum(times[1:])


def oracle(run: Simulation) -> list[float]:
    """Per step, the time to generate the draws that it used up, all submitted at once."""
    times, start = [], 0
    for trained in run.trained:
        fleet = Fleet(engines=run.scenario.engines, slots=run.scenario.slots)
        for index in range(start, trained[-1] + 1):
            fleet.submit(index, run.attempts[index].lengths)
        while fleet.in_flight:
            fleet.step()
        times.append(fleet.now)
        start = trained[-1] + 1
    return times


@pytest.mark.parametrize(
    ("rate", "slots", "drift"), [(0.28, 32, 0.0), (0.5, 64, 0.0), (0.9, 32, 0.0), (0.5, 32, 0.05), (0.5, 32, -0.02)]
)
def test_streaming_is_as_fast_as_an_oracle_and_wastes_little(rate, slots, drift):
    result = streamed(make_scenario(rate, slots, steps=6 if drift else 4, rate_drift=drift))
    alone = oracle(result)
    assert later(result.generation) <= 1.05 * later(alone)
    assert result.generation[0] <= 1.3 * alone[0]
    assert result.wasted <= 0.05


def test_it_beats_a_barrier():
    scenario = make_scenario(slots=64)
    own = later(streamed(scenario).generation)
    assert own <= 0.75 * later(barrier(scenario).generation)


@pytest.mark.parametrize(("rate", "drift"), [(0.5, 0.02), (0.5, -0.02), (0.9, 0.0)])
def test_staleness_keeps_the_engines_busy_and_wastes_next_to_nothing(rate, drift):
    result = streaming(make_scenario(rate, steps=6, rate_drift=drift, sync=150), max_staleness=1)
    assert result.idle <= 0.05 and result.wasted <= 0.01
    trained = [index for step in result.trained for index in step]
    assert trained == sorted(set(trained))


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
        pytest.param(lambda scenario: streaming(scenario, max_staleness=1), False, id="draw order, staleness 1"),
        pytest.param(lambda scenario: streaming(scenario, admission="completion"), True, id="completion"),
        pytest.param(first_finished, True, id="first finished wins"),
    ],
)
def test_draw_order_is_not_biased_to_short_responses_and_completion_is(policy, biased):
    """Mean lengths of trained groups against those of all mixed groups drawn, finished or not.

    Means of few responses differ most: with 4 the D of `completion` is 2.5 times that with 16, at the same bound.
    """
    scenario = Scenario(workload=Workload(rate=0.5, wrong_longer=1.5, n=4), batch=64, slots=32, steps=120)
    result = policy(scenario)
    trained = [np.mean(result.attempts[index].lengths) for step in result.trained for index in step]
    drawn = [np.mean(attempt.lengths) for attempt in result.started if attempt.is_mixed]
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
        if (ended := fleet.step()) and ended[2]:
            ends[ended[0]] = fleet.now
    # The third draw takes the slots of the first engine at 2, 3, 5 and 7.
    assert ends == {0: 9, 1: 30, 2: 23}
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


def test_a_response_alone_is_faster_on_a_crowded_engine():
    fleet = Fleet(engines=1, slots=2, crowding=0.5)
    fleet.submit(0, (4, 8))
    ends = []
    while fleet.in_flight:
        fleet.step()
        ends.append(fleet.now)
    assert ends == [4, 4 + 4 * 0.75]


@pytest.mark.parametrize(("notice", "told"), [pytest.param(0, False, id="untold"), pytest.param(30, True, id="told")])
def test_an_untold_engine_costs_its_tokens(notice: int, told: bool):
    fleet = Fleet(engines=1, slots=2, preemption=Preemption(lost=0.001, back=100, notice=notice))
    leaves = int(fleet.next_event) + notice
    fleet.submit(0, (leaves + 50,))
    fleet.submit(1, (leaves + 60,))
    while fleet.in_flight:
        fleet.step()
    assert fleet.repeated == (0 if told else 2 * leaves)
    assert int(fleet.now) == leaves + 100 + (60 if told else leaves + 60)
    assert fleet.there == pytest.approx(2 * (fleet.now - 100))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("notice", [0, 200])
def test_no_draw_is_lost_with_an_engine(notice: int, staleness: int):
    scenario = make_scenario(steps=12, update=100.0, engines=4, median=200, cap=1000)
    calm, run = (
        streamed(replace(scenario, preemption=preemption), staleness)
        for preemption in (ALWAYS, Preemption(lost=0.3, back=1000, notice=notice))
    )
    trained = [index for step in run.trained for index in step]
    assert trained == sorted(set(trained)) and len(trained) == 12 * scenario.batch
    assert 0.6 < run.present / scenario.engines < 0.8
    assert later(run.steps) > 1.1 * later(calm.steps)
    assert (run.fleet.repeated == 0) == bool(notice)


def test_engines_that_are_lost_before_a_response_ends_are_told():
    with pytest.raises(ValueError, match="give a longer notice"):
        streaming(replace(make_scenario(engines=1), preemption=Preemption(lost=0.5, back=50)))
