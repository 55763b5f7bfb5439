"""The oversampling buffer against scripted rewards, random orders of completion, staleness and stops."""

import math
import random

import pytest

from dapo.sampling.budget import BudgetExhausted
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.outcome import ALL_CORRECT, ALL_WRONG, MIXED, UNSCORABLE, classify
from dapo.types import Collected
from tests.support.fakes import make_group

NAN = math.nan


def make_buffer(batch: int = 4, max_in_flight: int = 12, max_draws: int = 0, **options) -> OversamplingBuffer:
    return OversamplingBuffer(train_batch_size=batch, max_in_flight=max_in_flight, max_draws=max_draws, **options)


def finish(buffer: OversamplingBuffer, index: int, accuracies: list[float]) -> None:
    group = make_group(index, accuracies)
    buffer.generated(index, group.num_tokens)
    buffer.add(group)


def run_step(buffer: OversamplingBuffer, verdicts, order: random.Random, version: int = 0) -> Collected:
    """Drives one step; draws complete in random order. verdicts: accuracies by draw index."""
    buffer.serving(version)
    buffer.open()
    running: list[int] = []
    while not buffer.full:
        running += buffer.take()
        index = running.pop(order.randrange(len(running)))
        finish(buffer, index, verdicts(index))
    collected = buffer.close()
    buffer.trained()
    return collected


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


def test_a_group_needs_its_share_of_scored_responses():
    group = make_group(0, [1.0, 0.0, NAN, NAN])
    assert classify(group, min_scored=2) == MIXED
    assert classify(group, min_scored=3) == UNSCORABLE


def test_keeps_the_first_mixed_groups_in_draw_order_whatever_finishes_first():
    def verdicts(index: int) -> list[float]:
        return [1.0, 0.0] if index % 3 == 1 else [0.0, 0.0]

    for seed in range(50):
        collected = run_step(make_buffer(), verdicts, random.Random(seed))
        assert [group.draw.index for group in collected.groups] == [1, 4, 7, 10]
        assert [group.draw.index for group in collected.drawn] == list(range(11))
        assert collected.outcomes == {MIXED: 4, ALL_WRONG: 7}
        assert list(collected.returned) == list(range(11, 11 + len(collected.returned)))


def test_completion_trains_on_what_finishes_first_and_draws_the_rest_again():
    buffer = make_buffer(batch=2, max_in_flight=4, admission="completion")
    buffer.open()
    assert buffer.take() == [0, 1, 2, 3]
    finish(buffer, 3, [1.0, 0.0])
    finish(buffer, 1, [1.0, 0.0])
    collected = buffer.close()
    buffer.trained()
    assert [group.draw.index for group in collected.groups] == [1, 3]
    assert collected.returned == (0, 2)
    buffer.serving(1)
    buffer.open()
    assert buffer.take()[:2] == [0, 2]


def test_consecutive_steps_skip_no_draw():
    rng = random.Random(1)
    kinds = {index: [1.0, 0.0] if rng.random() < 0.4 else [1.0, 1.0] for index in range(2000)}
    buffer = make_buffer()
    drawn: list[int] = []
    for step in range(20):
        drawn += [g.draw.index for g in run_step(buffer, kinds.__getitem__, random.Random(step), step).drawn]
    assert drawn == list(range(len(drawn)))


def test_in_flight_never_exceeds_its_bound_and_refills_at_once():
    buffer = make_buffer(batch=8, max_in_flight=10)
    buffer.open()
    running = list(buffer.take())
    assert len(running) == 10
    for index in list(running):
        finish(buffer, index, [0.0, 0.0])
        running += buffer.take()
        assert buffer.in_flight == 10


def test_without_filter_every_scorable_group_is_trained_on_and_nothing_is_oversampled():
    buffer = make_buffer(filter_groups=False)
    buffer.open()
    assert buffer.take() == [0, 1, 2, 3]
    for index, accuracies in enumerate([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]):
        finish(buffer, index, accuracies)
    assert [group.draw.index for group in buffer.close().groups] == [0, 1, 2, 3]


def draw_until_the_budget_ends(buffer: OversamplingBuffer, verdicts) -> int:
    buffer.open()
    taken = 0
    while not buffer.full:
        for index in buffer.take():
            taken += 1
            finish(buffer, index, verdicts(index))
    return taken


def test_budget_ends_with_the_rates_and_what_to_change():
    buffer = make_buffer(batch=4, max_in_flight=6, max_draws=12)
    with pytest.raises(BudgetExhausted, match="12 draws for one update, and 0 of the 4") as error:
        draw_until_the_budget_ends(buffer, lambda index: [1.0, 1.0] if index % 4 else [0.0, 0.0])
    message = str(error.value)
    assert "mixed 0%, all correct 75%, all wrong 25%, unscorable 0%, stale 0%" in message
    assert "pass rate: 0: 3, 0..0.25: 0, 0.25..0.5: 0, 0.5..0.75: 0, 0.75..1: 0, 1: 9" in message
    assert "too easy" in message and "filter_groups.max_num_gen_batches" in message


def test_a_partial_batch_is_trained_on_where_asked_for_but_an_empty_one_is_an_error():
    buffer = make_buffer(batch=4, max_in_flight=6, max_draws=12, on_budget="train_partial")
    assert draw_until_the_budget_ends(buffer, lambda index: [1.0, 0.0] if index in (2, 11) else [1.0, 1.0]) == 12
    collected = buffer.close()
    buffer.trained()
    assert [group.draw.index for group in collected.groups] == [2, 11] and len(collected.drawn) == 12
    with pytest.raises(BudgetExhausted):
        draw_until_the_budget_ends(buffer, lambda index: [1.0, 1.0])


def test_accepted_groups_survive_a_stop():
    buffer = make_buffer(batch=4, max_in_flight=6, max_draws=12)
    with pytest.raises(BudgetExhausted):
        draw_until_the_budget_ends(buffer, lambda index: [1.0, 0.0] if index in (2, 11) else [1.0, 1.0])
    again = make_buffer(batch=3, max_in_flight=6)
    again.restore(buffer.state(), buffer.held(), version=0)
    again.open()
    running = again.take()
    assert running and running[0] == 12, "nothing is drawn twice"
    finish(again, 12, [1.0, 0.0])
    assert [group.draw.index for group in again.close().groups] == [2, 11, 12]


def test_a_gap_in_the_draw_order_is_closed_after_a_stop():
    """What is held beyond the gap would fill the batch, but its turn comes after the draw that was in flight."""
    buffer = make_buffer(batch=2, max_in_flight=4, max_draws=4)
    buffer.open()
    assert buffer.take() == [0, 1, 2, 3]
    for index in (1, 2, 3):
        finish(buffer, index, [1.0, 0.0])
    again = make_buffer(batch=2, max_in_flight=4, max_draws=4)
    again.restore(buffer.state(), buffer.held(), version=0)
    again.open()
    assert again.take() == [0] and not again.full
    finish(again, 0, [1.0, 1.0])
    assert [group.draw.index for group in again.close().groups] == [1, 2]


def test_a_batch_is_kept_until_it_was_trained_on():
    buffer = make_buffer(batch=2, max_in_flight=4)
    buffer.open()
    for index in buffer.take():
        finish(buffer, index, [1.0, 0.0] if index else [0.0, 0.0])
    collected = buffer.close()
    assert buffer.draws.counts["trained"] == 0
    again = make_buffer(batch=2, max_in_flight=4)
    again.restore(buffer.state(), buffer.held(), version=0)
    again.open()
    assert again.full and [g.draw.index for g in again.close().groups] == [g.draw.index for g in collected.groups]
    again.trained()
    assert again.draws.counts["trained"] == 2 and again.held() == []


def test_nothing_is_generated_for_updates_after_the_last():
    buffer = make_buffer(batch=4, max_in_flight=100, max_staleness=1, total_steps=2, filter_groups=False)
    counts = []
    for version in range(2):
        buffer.serving(version)
        buffer.open()
        taken = buffer.take()
        for index in taken:
            finish(buffer, index, [1.0, 0.0])
        buffer.close()
        buffer.trained()
        counts.append((len(taken), len(buffer.take())))
    assert counts == [(8, 0), (0, 0)]


def test_a_mixed_group_that_leaves_nothing_to_train_on_is_replaced_and_reported_as_mixed():
    buffer = make_buffer(batch=2, max_in_flight=4, has_signal=lambda group: group.draw.index != 1)
    buffer.open()
    for index in buffer.take():
        finish(buffer, index, [1.0, 0.0])
    collected = buffer.close()
    assert [group.draw.index for group in collected.groups] == [0, 2]
    assert [group.draw.index for group in collected.drawn] == [0, 1, 2] and collected.outcomes == {MIXED: 3}
    assert buffer.rate.state() == [0.5 * (0.5 + 2), 0.5 * (1 + 3)]
    buffer.trained()
    metrics = buffer.metrics()
    assert (metrics["ledger/draws_trained"], metrics["ledger/draws_overlong"]) == (2, 1)
    assert metrics["ledger/dropped_overlong"] > 0


def test_without_filter_a_group_without_signal_is_trained_on():
    buffer = make_buffer(batch=2, filter_groups=False, has_signal=lambda group: False)
    buffer.open()
    for index in buffer.take():
        finish(buffer, index, [1.0, 0.0])
    assert len(buffer.close().groups) == 2


def test_a_budget_that_overlong_filtering_spent_says_so():
    buffer = make_buffer(batch=2, max_in_flight=4, max_draws=4, has_signal=lambda group: False)
    with pytest.raises(BudgetExhausted, match="mixed 75%, all correct 25%") as error:
        draw_until_the_budget_ends(buffer, lambda index: [1.0, 0.0] if index else [1.0, 1.0])
    assert "data.max_response_length" in str(error.value) and "too easy" not in str(error.value)
