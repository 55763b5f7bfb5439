"""When lending pays: the seconds against a queue that is worked off slot by slot, and what the rule may never say."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.sampling.lending import Lending

SECONDS = st.floats(0.0, 300.0)
EXAMPLES = settings(deadline=None, max_examples=200)
LENDINGS = st.builds(Lending, own=st.integers(1, 2000), lent=st.integers(0, 2000), wake_s=SECONDS, sleep_s=SECONDS)
WAITING = st.floats(0.0, 10_000.0)
RESPONSE = st.floats(0.1, 500.0)


@EXAMPLES
@given(lending=LENDINGS, waiting=WAITING, response=RESPONSE)
def test_the_gain_is_never_more_than_the_others_could_take_nor_less_than_the_sleep(lending, waiting, response):
    alone = waiting * response / lending.own
    gain = lending.gain_s(waiting, response)
    share = lending.lent / (lending.own + lending.lent)
    assert -lending.sleep_s - 1e-6 <= gain <= max(0.0, alone - lending.wake_s) * share - lending.sleep_s + 1e-6


@EXAMPLES
@given(lending=LENDINGS, waiting=WAITING, more=WAITING, response=RESPONSE)
def test_more_that_waits_makes_it_pay_the_more(lending, waiting, more, response):
    assert lending.gain_s(waiting + more, response) >= lending.gain_s(waiting, response) - 1e-6


@EXAMPLES
@given(lending=LENDINGS, waiting=WAITING, response=RESPONSE, more=SECONDS)
def test_dearer_switches_make_it_pay_the_less(lending, waiting, response, more):
    for wake, sleep in ((more, 0.0), (0.0, more)):
        dearer = Lending(
            own=lending.own, lent=lending.lent, wake_s=lending.wake_s + wake, sleep_s=lending.sleep_s + sleep
        )
        assert dearer.gain_s(waiting, response) <= lending.gain_s(waiting, response) + 1e-6


@pytest.mark.parametrize("waiting", [0, 3])
@pytest.mark.parametrize("lent", [0, 64])
def test_it_never_pays_where_nothing_waits_long_or_nothing_could_be_lent(waiting, lent):
    lending = Lending(own=64, lent=lent, wake_s=10.0, sleep_s=10.0)
    assert lending.gain_s(waiting, 100.0) <= 0
    assert (lending.gain_s(1000, 100.0) > 0) == bool(lent)


def finished(waiting: int, slots: list[float], response: float) -> float:
    """When the last of so many responses starts its slot's next free moment. slots: when each is free at first."""
    heapq.heapify(slots)
    for _ in range(waiting):
        heapq.heapreplace(slots, slots[0] + response)
    return slots[0]


@pytest.mark.parametrize("waiting", [0, 100, 1000, 5000])
@pytest.mark.parametrize(("own", "lent"), [(64, 64), (128, 32), (16, 200)])
@pytest.mark.parametrize("wake", [0.0, 40.0])
def test_against_a_queue_worked_off_slot_by_slot(waiting, own, lent, wake):
    """The next response waits by the gain less long, to within two responses' time: slots free up one by one."""
    response, sleep = 20.0, 7.0
    stagger = [response * slot / own for slot in range(own)]
    late = [max(wake, response * slot / lent) for slot in range(lent)]
    apart = finished(waiting, list(stagger), response)
    together = finished(waiting, stagger + late, response)
    gain = Lending(own=own, lent=lent, wake_s=wake, sleep_s=sleep).gain_s(waiting, response)
    assert abs(gain - (apart - together - sleep)) <= 2 * response
