"""The oversampling buffer by example, and the error of a spent budget: rates, histogram, remedy."""

import math
import re
from dataclasses import replace

import pytest

from dapo.algorithm.fate import TRAINED, Fate
from dapo.algorithm.outcome import ALL_CORRECT, ALL_WRONG, MIXED, UNSCORABLE, classify
from dapo.sampling.budget import FAILED, REMEDIES, Budget, BudgetExhausted
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.draws import STALE, State
from tests.support.fakes import make_group, make_response

NAN = math.nan


def make_buffer(batch: int = 4, max_in_flight: int = 12, max_draws: int = 0, **options) -> OversamplingBuffer:
    return OversamplingBuffer(train_batch_size=batch, max_in_flight=max_in_flight, max_draws=max_draws, **options)


def finish(buffer: OversamplingBuffer, index: int, accuracies: list[float]) -> None:
    group = make_group(index, accuracies)
    buffer.generated(index, group.num_tokens)
    buffer.add(group)


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
    assert [group.draw.index for group in collected.drawn] == [0, 1, 2] and collected.outcomes == (MIXED,) * 3
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


BINS = ["0", "0..0.25", "0.25..0.5", "0.5..0.75", "0.75..1", "1"]


def budget_of(*groups: list[float], drawn: int = 0, **options) -> Budget:
    budget = Budget(**{"max_draws": 99, "gen_batch": 1, "train_partial": False, **options})
    budget.drawn = drawn or len(groups)
    for index, accuracies in enumerate(groups):
        group = make_group(index, accuracies)
        budget.add(group, classify(group), classify(group))
    return budget


def message_of(budget: Budget, *, usable: int, wanted: int) -> str:
    with pytest.raises(BudgetExhausted) as error:
        budget.end(usable=usable, wanted=wanted)
    return str(error.value)


def histogram(message: str) -> dict[str, int]:
    found = re.search(r"groups by pass rate: (.*)\n", message)
    assert found, message
    return {name: int(count) for name, count in (part.split(": ") for part in found[1].split(", "))}


def share(message: str, name: str) -> int:
    found = re.search(rf"\b{name} (\d+)%", message)
    assert found, message
    return int(found[1])


def right(count: int, of: int = 16) -> list[float]:
    return [1.0] * count + [0.0] * (of - count)


def test_each_pass_rate_has_its_bin():
    groups = [right(0), right(1), right(4), right(8), right(15), right(16), [0.95] * 16]
    groups += [[NAN] * 14 + [1.0, 0.0], [NAN] * 4]  # NaN counts neither way, and a group without verdicts nowhere
    found = histogram(message_of(budget_of(*groups), usable=0, wanted=16))
    assert found == dict(zip(BINS, [1, 1, 1, 2, 2, 1], strict=True))


def test_the_rates_are_shares_of_the_scored_groups():
    groups = [right(16)] * 5 + [right(0)] * 2 + [right(8)] * 2 + [[NAN] * 4]
    budget = budget_of(*groups, drawn=20)
    budget.stale = 5
    message = message_of(budget, usable=2, wanted=8)
    assert message.startswith("20 draws ") and " 2 of the 8 usable groups " in message
    rates = {name: share(message, name.replace("_", " ")) for name in (MIXED, ALL_CORRECT, ALL_WRONG, UNSCORABLE)}
    assert rates == {MIXED: 20, ALL_CORRECT: 50, ALL_WRONG: 20, UNSCORABLE: 10}
    assert sum(histogram(message).values()) == 9
    assert share(message, "stale") == 25, "of the draws"
    assert share(message, "responses without a verdict") == 3  # 4 of 148


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        pytest.param([right(16)] * 3 + [right(0)] * 2, ALL_CORRECT, id="too easy"),
        pytest.param([right(16)] * 2 + [right(0)] * 3, ALL_WRONG, id="too hard"),
        pytest.param([right(16)] * 2 + [[NAN] * 16] * 3, UNSCORABLE, id="no verdicts"),
        pytest.param([[1.0] * 9 + [NAN] * 7] * 5, UNSCORABLE, id="verdicts on right answers alone"),
        pytest.param([right(16)] * 3 + [[1.0] * 9 + [NAN] * 7] * 2, UNSCORABLE, id="no verdict on what is not right"),
        pytest.param([right(16)] * 9 + [[1.0] * 15 + [NAN]], ALL_CORRECT, id="too easy, but for a few"),
        pytest.param([right(8)] * 9 + [right(0)], ALL_WRONG, id="mostly mixed, and the rest too hard"),
    ],
)
def test_the_remedy_is_that_of_the_largest_share(groups, reason):
    message = message_of(budget_of(*groups), usable=0, wanted=16)
    assert [name for name, remedy in REMEDIES.items() if remedy in message] == [reason]
    for key in ("filter_groups.max_num_gen_batches", "data.train_batch_size", "filter_groups.on_budget=train_partial"):
        assert key in message


def test_responses_that_the_rollout_function_failed_are_no_fault_of_the_reward_function():
    """A function that fails for all but the shortest responses does not end the run by itself: it may be too long."""
    budget = budget_of(right(16), [NAN] * 16)
    for index in range(3):
        group = make_group(index, [NAN] * 15 + [1.0])
        ended = [replace(one, finish_reason="error") for one in group.responses[:15]]
        group = replace(group, responses=(*ended, *group.responses[15:]))
        budget.add(group, UNSCORABLE, UNSCORABLE)
    message = message_of(budget, usable=0, wanted=16)
    assert share(message, "unscorable") == 80
    assert [name for name, remedy in REMEDIES.items() if remedy in message] == [FAILED]
    assert "`rollout.function` fails" in message


def test_groups_that_overlong_filtering_empties_count_as_mixed_and_have_a_remedy_of_their_own():
    budget = budget_of(right(16), right(16))
    for index in range(3):
        budget.add(make_group(index, right(8)), MIXED, Fate.OVERLONG)
    message = message_of(budget, usable=0, wanted=16)
    assert share(message, "mixed") == 60 and share(message, "all correct") == 40
    assert [name for name, remedy in REMEDIES.items() if remedy in message] == [Fate.OVERLONG]


def test_what_is_left_and_a_partial_batch_is_never_nothing():
    for max_draws, drawn, left in [(0, 0, math.inf), (0, 10**6, math.inf), (24, 0, 24), (24, 23, 1), (24, 24, 0)]:
        assert budget_of(max_draws=max_draws, drawn=drawn).left == left
    budget = budget_of(right(8), right(0), train_partial=True)
    assert budget.end(usable=1, wanted=4) == 1
    assert " 0 of the 4 usable " in message_of(budget, usable=0, wanted=4)


def test_each_update_starts_with_an_empty_tally():
    budget = budget_of(right(16), right(0), drawn=9, max_draws=10)
    budget.open(stale=3)
    assert budget.left == 10
    message = message_of(budget, usable=0, wanted=4)
    assert message.startswith("0 draws ") and set(histogram(message).values()) == {0}


@pytest.mark.parametrize("train_partial", [False, True])
@pytest.mark.parametrize(("gen_batch", "groups"), [(50, 1000), (60, 1200)])
def test_without_a_bound_a_search_that_finds_nothing_ends(gen_batch, groups, train_partial):
    budget = budget_of(*[right(0)] * (groups - 1), max_draws=0, gen_batch=gen_batch, train_partial=train_partial)
    assert budget.left == math.inf
    budget.add(make_group(0, right(16)), ALL_CORRECT, ALL_CORRECT)
    assert budget.left == 0
    message = message_of(budget, usable=0, wanted=4)
    assert f"none among the last {groups}" in message and "max_num_gen_batches" not in message
    budget.open(stale=0)
    for index in range(1999):
        assert budget.left == math.inf
        usable = index == 999
        group = make_group(index, right(8 if usable else 0))
        budget.add(group, MIXED if usable else ALL_WRONG, TRAINED if usable else ALL_WRONG)


def test_a_run_without_a_bound_and_without_a_usable_group_ends():
    buffer = OversamplingBuffer(train_batch_size=4, max_in_flight=12)
    buffer.open()
    with pytest.raises(BudgetExhausted, match="none among the last 10"):
        while True:
            for index in buffer.take():
                finish(buffer, index, right(0, 4))
    assert 1000 <= buffer.draws.drawn < 1012


def test_a_group_is_as_old_as_its_oldest_token():
    """An engine outside of the cluster may lag behind the version at the start of a draw."""
    buffer = make_buffer(batch=2, max_in_flight=4, max_staleness=1, engines_lag=True, filter_groups=False)

    def end(index: int, *versions: int) -> None:
        group = make_group(index, [1.0, 0.0])
        buffer.generated(index, group.num_tokens)
        buffer.add(replace(group, responses=tuple(make_response(version=version) for version in versions)))

    buffer.serving(2)
    buffer.open()
    for index, versions in zip(buffer.take(), [(0, 2), (1, 2), (2, 2), (1, 1)], strict=True):
        end(index, *versions)
    assert buffer.draws.at(State.TO_RETRY) == [0] and buffer.draws.tokens[STALE] > 0, "too old for this update"
    [again] = buffer.take()
    end(again, 2, 2)
    collected = buffer.close()
    assert [group.draw.index for group in collected.groups] == [0, 1]
    assert collected.returned == (3,), "too old for the next update, which the third is not"
