"""The oversampling buffer against scripted rewards and random orders of completion."""

import math
import random

import pytest

from dapo.buffer import (
    ALL_CORRECT,
    ALL_WRONG,
    MIXED,
    UNSCORABLE,
    BudgetExhausted,
    Collected,
    OversamplingBuffer,
    UsableRate,
    classify,
)
from tests.fakes import make_group

NAN = math.nan


def make_buffer(batch: int = 4, gen_batch: int = 12, max_batches: int = 0, filter_groups: bool = True):
    return OversamplingBuffer(
        train_batch_size=batch, gen_batch_size=gen_batch, max_num_gen_batches=max_batches, filter_groups=filter_groups
    )


def run_step(buffer: OversamplingBuffer, verdicts, order: random.Random, cursor: int) -> Collected:
    """Drives one step; draws complete in random order. verdicts: accuracies by draw index."""
    buffer.open(cursor)
    running: list[int] = []
    while buffer.last_needed is None:
        running += buffer.take()
        index = running.pop(order.randrange(len(running)))
        buffer.add(make_group(index, verdicts(index)))
    return buffer.close()


@pytest.mark.parametrize(
    ("accuracies", "rewards", "expected"),
    [
        pytest.param([1.0] + [0.0] * 15, None, MIXED, id="one right of 16"),
        pytest.param([0.0] + [1.0] * 15, None, MIXED, id="one wrong of 16"),
        pytest.param([1.0] * 16, None, ALL_CORRECT, id="all right"),
        pytest.param([0.95] * 16, None, ALL_CORRECT, id="equal floats whose std is 1e-17"),
        pytest.param([0.95] * 12, None, ALL_CORRECT, id="12 equal floats"),
        pytest.param([0.0] * 16, [-1 - i / 16 for i in range(16)], ALL_WRONG, id="penalties differ, verdicts do not"),
        pytest.param([1.0] * 4, [1.0, 0.5, 0.2, 0.0], ALL_CORRECT, id="all right with penalties"),
        pytest.param([NAN, NAN, 1.0, 0.0], None, MIXED, id="mixed among the scored"),
        pytest.param([NAN, 1.0, 1.0, 1.0], None, ALL_CORRECT, id="NaN does not mix a group"),
        pytest.param([NAN, NAN, NAN, 1.0], None, UNSCORABLE, id="one scored"),
        pytest.param([NAN] * 4, None, UNSCORABLE, id="none scored"),
    ],
)
def test_classify(accuracies, rewards, expected):
    assert classify(make_group(0, accuracies, rewards)) == expected


def test_keeps_the_first_mixed_groups_in_draw_order_whatever_finishes_first():
    def verdicts(index: int) -> list[float]:
        return [1.0, 0.0] if index % 3 == 1 else [0.0, 0.0]

    for seed in range(50):
        collected = run_step(make_buffer(), verdicts, random.Random(seed), cursor=5)
        assert [group.draw.index for group in collected.groups] == [7, 10, 13, 16]
        assert [group.draw.index for group in collected.drawn] == list(range(5, 17))
        assert collected.outcomes == {MIXED: 4, ALL_WRONG: 8}
        assert collected.surplus.start == 17


def test_consecutive_steps_skip_no_draw():
    rng = random.Random(1)
    kinds = {index: [1.0, 0.0] if rng.random() < 0.4 else [1.0, 1.0] for index in range(2000)}
    buffer = make_buffer()
    drawn: list[int] = []
    for step in range(20):
        drawn += [g.draw.index for g in run_step(buffer, kinds.__getitem__, random.Random(step), buffer.cursor).drawn]
    assert drawn == list(range(buffer.cursor))


def test_in_flight_never_exceeds_the_generation_batch_and_refills_at_once():
    buffer = make_buffer(batch=8, gen_batch=10)
    buffer.open(0)
    running = list(buffer.take())
    assert len(running) == 10
    for index in list(running):
        buffer.add(make_group(index, [0.0, 0.0]))
        running += buffer.take()
        assert buffer.in_flight == 10


def test_without_filter_every_scorable_group_is_trained_on_and_nothing_is_oversampled():
    buffer = make_buffer(filter_groups=False)
    buffer.open(0)
    draws = list(buffer.take())
    assert draws == [0, 1, 2, 3]
    for index, accuracies in enumerate([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]):
        buffer.add(make_group(index, accuracies))
    assert [group.draw.index for group in buffer.close().groups] == [0, 1, 2, 3]


def test_budget_ends_with_the_rates_and_what_to_change():
    buffer = make_buffer(batch=4, gen_batch=6, max_batches=2)
    buffer.open(0)
    taken = 0
    with pytest.raises(BudgetExhausted, match="12 draws gave 0 of the 4") as error:
        while True:
            for index in buffer.take():
                taken += 1
                buffer.add(make_group(index, [1.0, 1.0] if index % 4 else [0.0, 0.0]))
    assert taken == 12
    assert "all_correct 75%" in str(error.value)
    assert "filter_groups.max_num_gen_batches" in str(error.value)


def test_rate_estimate_follows_the_data_and_asks_for_enough():
    rate = UsableRate(certain=False)
    assert rate.value == 0.5
    for _ in range(30):
        rate.observe(usable=16, draws=20)
    assert rate.value == pytest.approx(0.8, abs=0.01)
    assert 20 <= rate.draws_for(16) <= 23
    assert rate.draws_for(0) == 0
    other = UsableRate(certain=False)
    other.restore(rate.state())
    assert other.draws_for(7) == rate.draws_for(7)
