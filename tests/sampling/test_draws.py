"""The table of draws alone: transitions, tokens, which draw starts next, and what a checkpoint keeps of it."""

import json
import random
from dataclasses import asdict

import pytest

from dapo.sampling.draws import DROPPED, LOST, REFUSED, STALE, STOPPED, SURPLUS, TRAINED, BufferState, Draws, State
from dapo.sampling.outcome import MIXED
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


@pytest.mark.parametrize("state", TOWARDS)
def test_only_what_was_handed_to_the_update_ends_with_it(state):
    draws = table_at(state)
    draws.trained()
    ended = state in (State.TRAINING, ENDED)
    assert +draws.counts == {TRAINED if ended else state: 1}
    assert list(draws.live) == ([] if ended else [0])


@pytest.mark.parametrize("state", TOWARDS)
def test_a_start_takes_what_went_back_before_a_new_draw(state):
    draws = table_at(state)
    assert draws.start(1, 9) == [0 if state is State.TO_RETRY else 1]
    assert draws.live[draws.at(State.IN_GENERATION)[-1]].started == 9


@pytest.mark.parametrize(
    ("state", "action", "tokens"),
    [
        pytest.param(State.IN_REWARD, "scored", {}, id="buffered"),
        pytest.param(State.BUFFERED, "train", {}, id="training"),
        pytest.param(State.TRAINING, "trained", {TRAINED: TOKENS}, id="trained"),
        pytest.param(State.BUFFERED, "send_back", {STALE: TOKENS}, id="back from the buffer"),
        pytest.param(State.IN_REWARD, "send_back", {STALE: TOKENS}, id="back from the verifier"),
        pytest.param(State.TRAINING, "refuse", {REFUSED: TOKENS}, id="back from the update"),
        pytest.param(State.TO_RETRY, "start", {STALE: TOKENS}, id="again"),
    ],
)
def test_tokens_follow_their_draw(state, action, tokens):
    draws = table_at(state)
    ACTIONS[action](draws)
    assert +draws.tokens == tokens and draws.generated_tokens == TOKENS


def test_a_draw_without_all_responses_has_no_tokens_to_lose():
    draws = table_at(State.IN_GENERATION)
    draws.send_back([0], SURPLUS)
    assert draws.generated_tokens == draws.tokens.total() == 0


@pytest.mark.parametrize("outcome", [MIXED, *DROPPED])
def test_a_draw_ends_as_its_outcome_says(outcome):
    draws = table_at(State.IN_REWARD)
    score(draws, 0, outcome)
    assert draws.usable == (outcome == MIXED)
    draws.train([0])
    assert draws.usable == 0
    draws.trained()
    assert +draws.counts == {TRAINED if outcome == MIXED else outcome: 1}


def scored_table(count: int, order: list[int]) -> Draws:
    """`count` draws in flight, those of `order` scored in this order."""
    draws = Draws()
    draws.start(count, 0)
    for index in order:
        draws.generated(index, TOKENS)
        score(draws, index)
    return draws


def test_scored_draws_stand_in_the_order_of_their_verdicts_and_held_groups_in_draw_order():
    draws = scored_table(6, [4, 1, 5, 0])
    draws.train([1])
    assert draws.at(State.BUFFERED) == [4, 5, 0] and draws.usable == 3
    assert [group.draw.index for group, _ in draws.held()] == [0, 1, 4, 5], "until the update is done"
    draws.trained()
    assert [group.draw.index for group, _ in draws.held()] == [0, 4, 5]
    draws.send_back([4], SURPLUS)
    assert [group.draw.index for group, _ in draws.held()] == [0, 5] and draws.usable == 2


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


def send_back(draws: Draws, index: int, reason: str) -> None:
    if reason == REFUSED:
        draws.train([index])
    draws.send_back([index], reason)


def busy_table() -> Draws:
    """Draws 0 to 11 in every state, some tokens lost for every reason."""
    draws = scored_table(12, list(range(2, 10)))
    draws.generated(1, 7)
    send_back(draws, 3, SURPLUS)
    send_back(draws, 4, STALE)
    send_back(draws, 5, REFUSED)
    send_back(draws, 9, STOPPED)
    draws.start(1, 2)
    draws.train([6, 7])
    draws.trained()
    draws.train([8])
    draws.tokens[SURPLUS] += 17
    return draws


def restored(draws: Draws) -> Draws:
    again = Draws()
    state = BufferState.parse(json.loads(json.dumps(asdict(draws.state([1.0, 2.0])))))
    again.restore(state, draws.held())
    for group, _ in draws.held():
        again.scored(group, MIXED, TRAINED)
    return again


def test_a_table_comes_back_from_json_with_what_ran_to_be_started_again():
    draws = busy_table()
    again = restored(draws)
    assert [(index, again.live[index].state) for index in sorted(again.live)] == [
        *((0, State.TO_RETRY), (1, State.TO_RETRY), (2, State.BUFFERED), (3, State.TO_RETRY), (4, State.TO_RETRY)),
        *((5, State.TO_RETRY), (8, State.BUFFERED), (9, State.TO_RETRY), (10, State.TO_RETRY), (11, State.TO_RETRY)),
    ]
    held = [(id(group), started) for group, started in draws.held()]
    assert [(id(group), started) for group, started in again.held()] == held
    assert again.drawn == draws.drawn == 12
    assert again.tokens[STOPPED] == draws.tokens[STOPPED] + 7, "the verdicts of draw 1 were still to come"
    assert again.generated_tokens == draws.generated_tokens and again.usable == 2
    assert draws.live[1].state is State.IN_REWARD, "the running table is its own"
    assert again.start(9, 3) == [0, 1, 3, 4, 5, 9, 10, 11, 12]
    assert restored(restored(draws)).metrics() == restored(draws).metrics()


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
            send_back(draws, index, rng.choice(LOST))
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
    metrics = busy_table().metrics()
    assert (metrics["ledger/draws_buffered"], metrics["ledger/draws_to_retry"]) == (2, 3)
    assert (metrics["ledger/draws_in_generation"], metrics["ledger/draws_in_reward"]) == (4, 1)
    assert metrics["ledger/draws_trained"] == 2 and metrics["ledger/drawn"] == 12


def test_an_unused_table_has_metrics():
    metrics = Draws().metrics()
    assert metrics["ledger/goodput"] == 1.0 and metrics["ledger/drawn"] == 0
    assert all(value == 0 for name, value in metrics.items() if name != "ledger/goodput")
