"""The table of draws alone: transitions, gaps, metrics. `World` compares the rest at each event."""

import random

import pytest

from dapo.algorithm.fate import TRAINED
from dapo.algorithm.outcome import MIXED
from dapo.sampling.draws import DROPPED, LOST, REFUSED, STALE, SURPLUS, Draws, State
from tests.support.fakes import make_group

ENDED = "ended"
TOKENS = make_group(0, [1.0, 0.0]).num_tokens


def score(draws: Draws, index: int, outcome: str = MIXED) -> None:
    draws.scored(make_group(index, [1.0, 0.0]), outcome, TRAINED if outcome == MIXED else outcome)


ACTIONS = {
    "start": lambda draws: draws.start(1, 5),
    "generated": lambda draws: draws.generated(0, TOKENS),
    "scored": lambda draws: score(draws, 0),
    "train": lambda draws: draws.train([0]),
    "trained": lambda draws: draws.trained(),
    "send_back": lambda draws: draws.send_back([0], STALE),
    "refuse": lambda draws: draws.send_back([0], REFUSED),
}
TOWARDS = {  # how draw 0 gets to a state
    State.IN_GENERATION: ["start"],
    State.IN_REWARD: ["start", "generated"],
    State.BUFFERED: ["start", "generated", "scored"],
    State.TRAINING: ["start", "generated", "scored", "train"],
    State.TO_RETRY: ["start", "generated", "scored", "send_back"],
    ENDED: ["start", "generated", "scored", "train", "trained"],
}
EXIST = {
    (State.IN_GENERATION, "generated"): State.IN_REWARD,
    (State.IN_GENERATION, "send_back"): State.TO_RETRY,
    (State.IN_REWARD, "scored"): State.BUFFERED,
    (State.IN_REWARD, "send_back"): State.TO_RETRY,
    (State.BUFFERED, "train"): State.TRAINING,
    (State.BUFFERED, "send_back"): State.TO_RETRY,
    (State.TRAINING, "trained"): TRAINED,
    (State.TRAINING, "refuse"): State.TO_RETRY,
    (State.TO_RETRY, "start"): State.IN_GENERATION,
}


def table_at(state: str) -> Draws:
    draws = Draws()
    for action in TOWARDS[state]:
        ACTIONS[action](draws)
    return draws


@pytest.mark.parametrize("action", [name for name in ACTIONS if name not in ("start", "trained")])
@pytest.mark.parametrize("state", TOWARDS)
def test_every_transition_exists_or_raises(state, action):
    draws = table_at(state)
    after = EXIST.get((state, action))
    if after is None:
        with pytest.raises((AssertionError, KeyError)):
            ACTIONS[action](draws)
        return
    ACTIONS[action](draws)
    assert draws.live[0].state is after and +draws.counts == {after: 1} and draws.drawn == 1


def scored_table(count: int, order: list[int]) -> Draws:
    """`count` draws in flight, those of `order` scored in this order."""
    draws = Draws()
    draws.start(count, 0)
    for index in order:
        draws.generated(index, TOKENS)
        score(draws, index)
    return draws


@pytest.mark.parametrize(
    ("back", "gaps"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([0], 1, id="the first"),
        pytest.param([5], 0, id="the last"),
        pytest.param([3, 4, 5], 0, id="a tail"),
        pytest.param([1, 2, 5], 2, id="a tail and two before"),
        pytest.param([0, 1, 2, 3, 4, 5], 0, id="all"),
    ],
)
def test_gaps_are_what_stands_before_another_draw(back, gaps):
    draws = scored_table(6, [1, 4])
    draws.send_back(back, SURPLUS)
    assert draws.gaps() == gaps
    assert draws.start(len(back) + 2, 1) == [*back, 6, 7] and draws.gaps() == 0
    assert {draws.live[index].started for index in (*back, 6, 7)} == {1}


@pytest.mark.parametrize("settle", [False, True])
def test_the_shares_of_all_generated_tokens_sum_to_one(settle):
    rng = random.Random(3)
    draws = Draws()
    for index in draws.start(300, 0):
        tokens, end = rng.randrange(1, 50), rng.random()
        if end < 0.1:
            draws.send_back([index], SURPLUS)
            draws.tokens[SURPLUS] += tokens
            continue
        draws.generated(index, tokens)
        if end < 0.2 and not settle:
            continue
        score(draws, index, rng.choice(DROPPED) if end < 0.6 else MIXED)
        if end < 0.4:
            reason = rng.choice(LOST)
            if reason == REFUSED:
                draws.train([index])
            draws.send_back([index], reason)
        elif end < 0.9 or settle:
            draws.train([index])
    draws.trained()
    metrics = draws.metrics()
    shares = {name: value for name, value in metrics.items() if "goodput" in name or "dropped_" in name}
    shares |= {name: value for name, value in metrics.items() if "wasted_" in name}
    assert len(shares) == 9 and all(value > 0 for name, value in shares.items())
    waiting = sum(draw.tokens for draw in draws.live.values()) / metrics["ledger/tokens_generated"]
    assert sum(shares.values()) + waiting == pytest.approx(1.0)
    assert (waiting == 0) == settle
    states = sum(value for name, value in metrics.items() if name.startswith("ledger/draws_"))
    assert states == metrics["ledger/drawn"] == 300


def test_metrics_count_a_batch_under_way_as_buffered():
    draws = scored_table(5, [0, 1, 2])
    draws.generated(3, 7)
    draws.train([0])
    draws.trained()
    draws.train([1])
    draws.send_back([4], STALE)
    metrics = draws.metrics()
    states = {name: metrics[f"ledger/draws_{name}"] for name in ("buffered", "in_reward", "to_retry", "trained")}
    assert states == {"buffered": 2, "in_reward": 1, "to_retry": 1, "trained": 1} and metrics["ledger/drawn"] == 5
    unused = Draws().metrics()
    assert unused.pop("ledger/goodput") == 1.0 and not any(unused.values())
