"""Draws dealt out to sources: shares of any stretch, and the place of any draw without the ones before it."""

import random
from collections import Counter

import pytest

from dapo.data.shares import Shares

WEIGHTS = [[1.0], [0.5, 0.5], [3.0, 1.0], [0.7, 0.2, 0.1], [1.0, 1e-3], [5.0, 4.0, 3.0, 2.0, 1.0], [0.1] * 9]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_stretch_of_draws_holds_the_shares(weights: list[float]) -> None:
    shares = Shares(weights)
    assert sum(shares.parts) == pytest.approx(1) and shares.parts[0] == pytest.approx(weights[0] / sum(weights))
    places = [shares.place(index) for index in range(3000)]
    seen: Counter[int] = Counter()
    for index, (source, rank) in enumerate(places):
        assert shares.counts(index) == [seen[one] for one in range(len(weights))]
        assert rank == seen[source]
        seen[source] += 1
    for first in range(0, 3000, 37):
        for length in (1, 16, 100, 977):
            found = Counter(source for source, _ in places[first : first + length])
            for source, part in enumerate(shares.parts):
                assert abs(found[source] - part * len(places[first : first + length])) <= 2 + len(weights) / 2


def test_a_draw_far_out_needs_no_memory() -> None:
    shares = Shares([0.3, 0.3, 0.4])
    for index in (10**9, 10**15 + 7):
        before, after = shares.counts(index), shares.counts(index + 1)
        source, rank = shares.place(index)
        assert after[source] == before[source] + 1 == rank + 1 and sum(after) == index + 1


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_a_hundred_steps_are_within_a_percent(seed: int) -> None:
    """Whatever the steps' sizes: a step goes up to the last group that it needs."""
    rng = random.Random(seed)
    weights = [rng.uniform(0.05, 1) for _ in range(rng.randint(2, 6))]
    shares, drawn = Shares(weights), sum(rng.randint(4, 40) for _ in range(100))
    for count, part in zip(shares.counts(drawn), shares.parts, strict=True):
        assert abs(count / drawn - part) < 0.01
