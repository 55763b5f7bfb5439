"""What draws in flight will give, foretold from their verdicts: the counts, the odds, and that they are calibrated."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.prospects import Prospects
from tests.support.fakes import make_group

VERDICTS = st.lists(st.sampled_from([0.0, 1.0, math.nan]), max_size=6)


def told(index: int, verdicts: list[float], prospects: Prospects) -> None:
    prospects.start([index])
    for accuracy in verdicts:
        prospects.verdict(index, accuracy)


def learnt(groups: list[tuple[list[float], bool]]) -> Prospects:
    prospects = Prospects()
    for index, (verdicts, usable) in enumerate(groups):
        told(index, verdicts, prospects)
        prospects.end(index, usable)
    return prospects


@given(
    learn=st.lists(st.tuples(VERDICTS, st.booleans()), max_size=20),
    running=st.lists(VERDICTS, max_size=10),
    gone=st.integers(0, 10),
    rate=st.floats(0.01, 1.0),
)
def test_what_runs_is_counted_and_what_is_unheard_counts_as_the_rate(learn, running, gone, rate):
    prospects = learnt(learn)
    assert prospects.expected(rate).mean == 0, "what has ended is not expected"
    for index, verdicts in enumerate(running):
        told(100 + index, verdicts, prospects)
    both = prospects.expected(rate)
    assert -1e-9 <= both.mean <= len(running) + 1e-9 and 0 <= both.variance <= len(running) / 4 + 1e-9
    if not any(accuracy in (0.0, 1.0) for verdicts in running for accuracy in verdicts):
        assert both.mean == pytest.approx(len(running) * rate)
        assert both.variance == pytest.approx(len(running) * rate * (1 - rate), abs=1e-9)
    prospects.end_step(range(100, 100 + gone))
    assert prospects.expected(1.0).mean == pytest.approx(max(0, len(running) - gone))


@pytest.mark.parametrize("rate", [0.2, 0.6, 0.9])
def test_expectations_come_true(rate):
    """Draws of random groups, heard of up to a random verdict: as many turn out usable as was expected."""
    rng = random.Random(f"prospects/{rate}")

    def group() -> list[float]:
        right = rng.randrange(1, 8) if rng.random() < rate else rng.choice([0, 8])
        verdicts = [1.0] * right + [0.0] * (8 - right)
        rng.shuffle(verdicts)
        return verdicts

    prospects = learnt([(verdicts, len(set(verdicts)) == 2) for verdicts in (group() for _ in range(4000))])
    usable = 0
    for index in range(10_000, 14_000):
        verdicts = group()
        usable += len(set(verdicts)) == 2
        told(index, verdicts[: rng.randrange(9)], prospects)
    foretold = prospects.expected(rate)
    assert abs(usable - foretold.mean) <= 3 * math.sqrt(foretold.variance) + 20
    assert foretold.variance <= 0.75 * 4000 * rate * (1 - rate), "verdicts say something"


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_buffer_starts_more_when_verdicts_tell_that_what_runs_is_worth_nothing_and_only_where_it_draws_ahead(
    staleness,
):
    """Eight draws of a rate near one fill both batches; five verdicts of each agree, which mixed groups never did."""
    buffer = OversamplingBuffer(train_batch_size=4, max_in_flight=100, max_staleness=staleness)
    buffer.open()
    for index in range(200):
        buffer.prospects.start([-1 - index])
        for accuracy in [1.0, 0.0] if index % 2 else [0.0] * 6:
            buffer.prospects.verdict(-1 - index, accuracy)
        buffer.prospects.end(-1 - index, bool(index % 2))
    buffer.rate.restore([500.0, 1000.0])
    running = buffer.take()
    assert running and buffer.take() == []
    told = [buffer.verdict(index, 0.0) for index in running for _ in range(5)]
    assert (len(buffer.take()) > len(running) // 2) == bool(staleness) == all(told) == any(told)
    for index in running:
        buffer.generated(index, 2)
        buffer.add(make_group(index, [0.0, 0.0]))
    buffer.verdict(running[0], 1.0)  # late: its group is complete
    assert buffer.take()
