"""The error of a spent budget: rates, histogram, remedy and share of stale draws."""

import math
import re
from dataclasses import replace

import pytest

from dapo.sampling.budget import FAILED, REMEDIES, Budget, BudgetExhausted
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.draws import TRAINED
from dapo.sampling.outcome import ALL_CORRECT, ALL_WRONG, MIXED, OVERLONG, UNSCORABLE, classify
from tests.support.fakes import make_group

NAN = math.nan
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


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        pytest.param(right(0), "0", id="none right"),
        pytest.param(right(1), "0..0.25", id="one of 16"),
        pytest.param(right(3), "0..0.25", id="three of 16"),
        pytest.param(right(4), "0.25..0.5", id="a quarter"),
        pytest.param(right(7), "0.25..0.5", id="seven of 16"),
        pytest.param(right(8), "0.5..0.75", id="half"),
        pytest.param(right(12), "0.75..1", id="three quarters"),
        pytest.param(right(15), "0.75..1", id="15 of 16"),
        pytest.param(right(16), "1", id="all right"),
        pytest.param(right(1, 3), "0.25..0.5", id="a third"),
        pytest.param([NAN] * 14 + [1.0, 0.0], "0.5..0.75", id="NaN counts neither way"),
        pytest.param([NAN] * 15 + [1.0], "1", id="one scored, right"),
        pytest.param([0.95] * 16, "0.75..1", id="equal floats below 1"),
        pytest.param([1.0, 1e-9], "0.5..0.75", id="just over half"),
        pytest.param([NAN] * 4, None, id="none scored"),
    ],
)
def test_each_pass_rate_has_its_bin(accuracies, expected):
    found = histogram(message_of(budget_of(accuracies), usable=0, wanted=4))
    assert found == {name: int(name == expected) for name in BINS}


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


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        pytest.param([right(16)] * 3 + [right(0)] * 2, ALL_CORRECT, id="too easy"),
        pytest.param([right(16)] * 2 + [right(0)] * 3, ALL_WRONG, id="too hard"),
        pytest.param([right(16)] * 2 + [[NAN] * 16] * 3, UNSCORABLE, id="no verdicts"),
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
        budget.add(make_group(index, right(8)), MIXED, OVERLONG)
    message = message_of(budget, usable=0, wanted=16)
    assert share(message, "mixed") == 60 and share(message, "all correct") == 40
    assert [name for name, remedy in REMEDIES.items() if remedy in message] == [OVERLONG]


def test_without_a_scored_group_there_are_rates_all_the_same():
    message = message_of(budget_of(), usable=0, wanted=4)
    assert message.startswith("0 draws ") and " 0 of the 4 usable " in message and "stale 0%" in message
    assert set(histogram(message).values()) == {0}


@pytest.mark.parametrize(
    ("max_draws", "drawn", "left"),
    [(0, 0, math.inf), (0, 10**6, math.inf), (24, 0, 24), (24, 23, 1), (24, 24, 0)],
)
def test_what_is_left(max_draws, drawn, left):
    assert budget_of(max_draws=max_draws, drawn=drawn).left == left


def test_a_partial_batch_is_what_there_is_and_never_nothing():
    budget = budget_of(right(8), right(0), train_partial=True)
    assert budget.end(usable=1, wanted=4) == 1
    assert " 0 of the 4 usable " in message_of(budget, usable=0, wanted=4)


def test_each_update_starts_with_an_empty_tally():
    budget = budget_of(right(16), right(0), drawn=9, max_draws=10)
    budget.open(stale=3)
    assert budget.left == 10
    message = message_of(budget, usable=0, wanted=4)
    assert message.startswith("0 draws ") and set(histogram(message).values()) == {0}


def finish(buffer: OversamplingBuffer, indices: list[int], accuracies: list[float]) -> None:
    for index in indices:
        group = make_group(index, accuracies)
        buffer.generated(index, group.num_tokens)
        buffer.add(group)


@pytest.mark.parametrize("ahead", [2, 3, 12, 38])
def test_what_went_back_before_the_update_is_told_as_a_share_of_its_draws(ahead):
    buffer = OversamplingBuffer(train_batch_size=2, max_in_flight=40, max_draws=40, max_staleness=1)
    buffer.rate.restore([1e6, 2e7])  # rare: many are started ahead
    buffer.open()
    first = buffer.take(2 + ahead)
    finish(buffer, first[:2], [1.0, 0.0])
    buffer.close()
    buffer.trained()
    buffer.serving(1)
    buffer.open()
    finish(buffer, first[2:4], [1.0, 0.0])
    returned = buffer.close().returned
    assert len(returned) == ahead - 2
    buffer.trained()
    buffer.serving(2)
    buffer.open()
    with pytest.raises(BudgetExhausted) as error:
        for _ in range(50):
            finish(buffer, buffer.take(7), [0.0, 0.0])
    assert share(str(error.value), "stale") == round(100 * (ahead - 2) / 40)


def test_at_staleness_0_nothing_is_called_stale():
    """What goes back at the end of a step is surplus."""
    buffer = OversamplingBuffer(train_batch_size=2, max_in_flight=6, max_draws=6)
    buffer.open()
    finish(buffer, buffer.take()[:2], [1.0, 0.0])
    assert buffer.close().returned
    buffer.trained()
    buffer.serving(1)
    buffer.open()
    with pytest.raises(BudgetExhausted, match="stale 0%"):
        for _ in range(4):
            finish(buffer, buffer.take(), [0.0, 0.0])


@pytest.mark.parametrize("train_partial", [False, True])
@pytest.mark.parametrize(("gen_batch", "groups"), [(12, 1000), (50, 1000), (60, 1200)])
def test_without_a_bound_a_search_that_finds_nothing_ends(gen_batch, groups, train_partial):
    budget = budget_of(*[right(0)] * (groups - 1), max_draws=0, gen_batch=gen_batch, train_partial=train_partial)
    assert budget.left == math.inf
    budget.add(make_group(0, right(16)), ALL_CORRECT, ALL_CORRECT)
    assert budget.left == 0
    message = message_of(budget, usable=0, wanted=4)
    assert f"none among the last {groups}" in message and "max_num_gen_batches" not in message
    budget.open(stale=0)
    assert budget.left == math.inf


def test_without_a_bound_one_usable_group_lets_the_search_go_on():
    budget = budget_of(*[right(0)] * 999, max_draws=0, gen_batch=12)
    budget.add(make_group(0, right(8)), MIXED, TRAINED)
    for index in range(999):
        budget.add(make_group(index, right(0)), ALL_WRONG, ALL_WRONG)
    assert budget.left == math.inf


def test_a_run_without_a_bound_and_without_a_usable_group_ends():
    buffer = OversamplingBuffer(train_batch_size=4, max_in_flight=12)
    buffer.open()
    with pytest.raises(BudgetExhausted, match="none among the last 10"):
        for _ in range(300):
            finish(buffer, buffer.take(), right(0, 4))
    assert 1000 <= buffer.draws.drawn < 1012
