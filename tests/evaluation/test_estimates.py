"""avg@k, pass@k, best@k and maj@k against every subset of k samples, one by one; intervals against known ones."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo.evaluation.estimates import best_at, majority_at, over_problems, pass_at, sizes

SAMPLE = st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from(["", "a", "b", "c"]))
SAMPLES = st.lists(SAMPLE, min_size=1, max_size=7)


def mean_over_subsets(values, k, of) -> float:
    subsets = list(itertools.combinations(values, k))
    return sum(map(of, subsets)) / len(subsets)


def elected(accuracy_of):
    """The accuracy of the answer with most votes; of several, their mean."""

    def of(subset):
        votes = Counter(answer for _, answer in subset if answer)
        most = [answer for answer, count in votes.items() if count == max(votes.values())]
        return sum(accuracy_of[answer] for answer in most) / len(most) if most else 0.0

    return of


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(SAMPLES, st.integers(1, 8))
def test_estimates_are_the_mean_over_every_subset(samples, k):
    accuracies, answers = [accuracy for accuracy, _ in samples], [answer for _, answer in samples]
    found = (pass_at(accuracies, k), best_at(accuracies, k), majority_at(accuracies, answers, k))
    if k > len(samples):
        assert all(map(math.isnan, found))
        return
    accuracy_of = {
        answer: float(np.mean([accuracy for accuracy, given in samples if given == answer])) for answer in set(answers)
    }
    expected = (
        mean_over_subsets(accuracies, k, lambda subset: float(any(accuracy > 0.5 for accuracy in subset))),
        mean_over_subsets(accuracies, k, max),
        mean_over_subsets(samples, k, elected(accuracy_of)),
    )
    assert found == pytest.approx(expected, abs=1e-12)


def test_votes_that_tie_count_by_equal_parts():
    """Seven answers of one or two samples: up to k of them tie."""
    answers = [*"abcdefg", "a", "b"]
    samples = [(float(answer in "ac"), answer) for answer in answers]
    accuracy_of = {answer: float(answer in "ac") for answer in answers}
    for k in range(2, 8):
        found = majority_at([accuracy for accuracy, _ in samples], answers, k)
        assert found == pytest.approx(mean_over_subsets(samples, k, elected(accuracy_of)), abs=1e-12)


def test_pass_and_best_are_one_for_right_and_wrong_answers():
    for right in range(33):
        accuracies = [1.0] * right + [0.0] * (32 - right)
        for k in sizes(32):
            assert best_at(accuracies, k) == pytest.approx(pass_at(accuracies, k), abs=1e-12)
        assert pass_at(accuracies, 1) == pytest.approx(right / 32)


def test_as_many_samples_as_are_allowed_stay_numbers():
    accuracies = [1.0] * 300 + [0.0] * 700
    answers = ["right"] * 300 + [str(index % 5) for index in range(700)]
    for k in (2, 100, 1000):
        assert 0.3 <= majority_at(accuracies, answers, k) <= 1.0 + 1e-9
        assert 0.3 <= best_at(accuracies, k) <= pass_at(accuracies, k) + 1e-9 <= 1.0 + 2e-9


def test_sizes():
    assert [sizes(samples) for samples in (1, 2, 3, 6, 32)] == [[], [2], [2, 3], [2, 4, 6], [2, 4, 8, 16, 32]]


def test_intervals_cover_the_mean_as_often_as_they_say():
    """60 problems of accuracy 0.3, a thousand times."""
    rng = np.random.default_rng(1)
    draws = rng.random((1000, 60)) < 0.3
    problems = {str(number): row.astype(float).tolist() for number, row in enumerate(draws)}
    estimates = over_problems(problems).values()
    covered = np.mean([one.low <= 0.3 <= one.high for one in estimates])
    widths = np.mean([one.high - one.low for one in estimates])
    assert 0.92 <= covered <= 0.97
    assert widths == pytest.approx(2 * 1.96 * math.sqrt(0.3 * 0.7 / 60), rel=0.05)


def test_problems_without_a_value_are_left_out():
    nan = math.nan
    found = over_problems({"some": [1.0, nan, 0.0, nan], "none": [nan] * 4, "all": [1.0] * 4})
    assert found["some"].value == 0.5 and (found["some"].low, found["some"].high) == (0.0, 1.0)
    assert math.isnan(found["none"].value) and math.isnan(found["none"].low)
    assert found["all"].low == found["all"].high == 1.0


def test_intervals_are_the_same_again_and_in_parts(monkeypatch):
    values = {"a": np.random.default_rng(2).random(50).tolist()}
    whole = over_problems(values)
    assert over_problems(values) == whole
    monkeypatch.setattr("dapo.evaluation.estimates.RESAMPLED_AT_ONCE", 1000)
    assert over_problems(values)["a"].low == pytest.approx(whole["a"].low, abs=0.01)
