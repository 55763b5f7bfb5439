"""Why a group was dropped."""

import pytest

from dapo.tools.inspect.findings import why

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
