"""Why a group was dropped, why a step was slow, which reward function disagrees: against counts by hand."""

import itertools
import random

import pytest

from dapo.tools.inspect.findings import agreements, why, why_slow

GROUP = {"responses": 8, "scorable": 8, "accuracy": 0.25, "truncated": 0, "fate": "trained"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "trained on: 2 right of 8"),
        ({"scorable": 4}, "trained on: 1 right of 4 that could be scored"),
        ({"fate": "all_correct", "accuracy": 1.0}, "dropped, all correct: 8 right of 8"),
        ({"fate": "all_wrong", "accuracy": 0.0}, "dropped, all wrong: 0 right of 8"),
        ({"fate": "unscorable", "scorable": 1}, "dropped, unscorable: 7 of 8 have no verdict"),
        ({"fate": "unscorable", "scorable": 0, "accuracy": None}, "dropped, unscorable: 8 of 8 have no verdict"),
        ({"fate": "overlong", "truncated": 5}, "dropped, overlong: 5 of 8 truncated"),
        ({"fate": "of_tomorrow"}, "of_tomorrow"),
    ],
)
def test_why_a_group_was_trained_on_or_dropped(changes, words):
    assert why(GROUP | changes).startswith(words)


USUAL = {"step": 1, "seconds": 10.0, "generation": 6.0, "reward": 1.0, "update": 3.0, "sync": 0.5, "driver": 0.1}
USUAL |= {"reference": None, "sleep": None, "evaluation": None, "drawn": 40, "longest": 900}


@pytest.mark.parametrize(
    ("changes", "warnings", "words"),
    [
        ({"seconds": 30.0, "generation": 26.0}, [], "generation 26 s (median 6 s)"),
        (
            {"seconds": 20.0, "generation": 12.0, "drawn": 70},
            [],
            "generation 12 s (median 6 s); 70 groups drawn (median 40)",
        ),
        ({"seconds": 40.0, "sync": 30.5}, ["engine 1 is lost"], "sync 30.5 s (median 0.5 s); engine 1 is lost"),
        ({"seconds": 12.0, "reference": 2.0}, [], "reference 2 s (median 0 s)"),
        ({"seconds": None, "generation": None}, [], ""),
    ],
)
def test_why_a_step_was_slow(changes, warnings, words):
    step = USUAL | changes
    assert why_slow(step, [USUAL] * 4 + [step], warnings) == words


def test_agreement_is_counted_as_by_hand():
    """Random accuracies and rewards, some of them absent, against all pairs one by one."""
    rng = random.Random(3)
    answers = []
    for draw in range(40):
        for _ in range(6):
            accuracy = rng.choice([0.0, 0.0, 0.5, 1.0, None])
            right = accuracy or 0.0
            parts = {
                "same": right,
                "against": -right,
                "none": 1.0,
                "noise": rng.choice([0.0, 1.0, None]),
                "late": float(draw),
            }
            answers.append((draw, accuracy, parts))
    found = {one.name: one for one in agreements(answers)}
    for name, one in found.items():
        pairs = wrong = even = 0
        for draw in range(40):
            own = [(a, parts[name]) for d, a, parts in answers if d == draw and None not in (a, parts[name])]
            for (a, x), (b, y) in itertools.permutations(own, 2):
                if a > b:
                    pairs, wrong, even = pairs + 1, wrong + (x < y), even + (x == y)
        assert (one.pairs, one.wrong, one.even) == (pairs, wrong, even)
        assert one.disagreement == pytest.approx((wrong + even / 2) / pairs)
    assert {name: found[name].disagreement for name in ("same", "against", "none", "late")} == {
        "same": 0.0,
        "against": 1.0,
        "none": 0.5,
        "late": 0.5,
    }
    assert [one.name for one in agreements(answers)][0] == "against" and [*found][-4:] == [
        "noise",
        "same",
        "late",
        "none",
    ]
    assert found["same"].mean(True) == 1.0 and 0.0 < found["same"].mean(False) < 0.5
    assert found["same"].worst_draw is None and found["none"].worst_draw is None


def test_the_worst_draw_is_the_one_with_most_pairs_in_the_wrong_order():
    answers = [(1, 1.0, {"f": 1.0}), (1, 0.0, {"f": 0.0}), (3, 1.0, {"f": 0.0}), (3, 0.0, {"f": 1.0})]
    answers += [(2, 1.0, {"f": 0.0}), (2, 0.0, {"f": 1.0}), (2, 0.0, {"f": 1.0})]
    [one] = agreements(answers)
    assert (one.worst_draw, one.wrong, one.pairs) == (2, 3, 4)
