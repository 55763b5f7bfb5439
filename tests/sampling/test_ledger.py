"""The ledger alone: transitions, both identities, what `check` notices, and shares that sum to one."""

import copy
import json
import random
from collections import Counter

import pytest

from dapo.sampling.ledger import (
    ABORTED,
    BUFFERED,
    DROPPED,
    IN_GENERATION,
    IN_REWARD,
    LIVE,
    STALE,
    STOPPED,
    SURPLUS,
    TO_RETRY,
    TRAINED,
    Ledger,
)

ACTIONS = {
    "start": lambda ledger: ledger.start(7),
    "generated": lambda ledger: ledger.generated(7, 30),
    "buffer": lambda ledger: ledger.buffer(7),
    "train": lambda ledger: ledger.train(7),
    "drop": lambda ledger: ledger.drop(7, "all_wrong"),
    "retry": lambda ledger: ledger.retry(7, STALE),
}
TOWARDS = {  # how draw 7 gets to a state
    IN_GENERATION: ["start"],
    IN_REWARD: ["start", "generated"],
    BUFFERED: ["start", "generated", "buffer"],
    TO_RETRY: ["start", "generated", "buffer", "retry"],
    TRAINED: ["start", "generated", "buffer", "train"],
    "never seen": [],
}
EXIST = {
    (IN_GENERATION, "generated"): IN_REWARD,
    (IN_GENERATION, "retry"): TO_RETRY,
    (IN_REWARD, "buffer"): BUFFERED,
    (IN_REWARD, "retry"): TO_RETRY,
    (BUFFERED, "train"): TRAINED,
    (BUFFERED, "drop"): "all_wrong",
    (BUFFERED, "retry"): TO_RETRY,
    (TO_RETRY, "start"): IN_GENERATION,
    ("never seen", "start"): IN_GENERATION,
}


def ledger_at(state: str) -> Ledger:
    ledger = Ledger()
    for action in TOWARDS[state]:
        ACTIONS[action](ledger)
    return ledger


def held(ledger: Ledger) -> Counter[str]:
    return Counter({state: ledger.draws[state] for state in LIVE})


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("state", [state for state in TOWARDS if state != TRAINED])
def test_every_transition_exists_or_raises(state, action):
    ledger = ledger_at(state)
    after = EXIST.get((state, action))
    if after is None:
        with pytest.raises((AssertionError, KeyError)):
            ACTIONS[action](ledger)
        return
    ACTIONS[action](ledger)
    assert +ledger.draws == {after: 1} and ledger.drawn == 1
    ledger.check({after: 1} if after in LIVE else {})


@pytest.mark.parametrize("action", [name for name in ACTIONS if name != "start"])
def test_a_draw_that_ended_takes_no_further_part(action):
    ledger = ledger_at(TRAINED)
    with pytest.raises((AssertionError, KeyError)):
        ACTIONS[action](ledger)


@pytest.mark.parametrize(
    ("state", "action", "tokens"),
    [
        pytest.param(IN_REWARD, "buffer", {"generated": 30, BUFFERED: 30}, id="buffered"),
        pytest.param(BUFFERED, "train", {"generated": 30, TRAINED: 30}, id="trained"),
        pytest.param(BUFFERED, "drop", {"generated": 30, "all_wrong": 30}, id="dropped"),
        pytest.param(BUFFERED, "retry", {"generated": 30, STALE: 30}, id="back from the buffer"),
        pytest.param(IN_REWARD, "retry", {"generated": 30, STALE: 30}, id="back from the verifier"),
        pytest.param(IN_GENERATION, "retry", {}, id="back from the engines"),
        pytest.param(TO_RETRY, "start", {"generated": 30, STALE: 30}, id="again"),
    ],
)
def test_tokens_follow_their_draw(state, action, tokens):
    ledger = ledger_at(state)
    ACTIONS[action](ledger)
    assert +ledger.tokens == tokens


def busy_ledger() -> Ledger:
    """Draws 0 to 11 in every state, some tokens lost for every reason."""
    ledger = Ledger()
    for index in range(12):
        ledger.start(index)
    for index in range(1, 12):
        ledger.generated(index, 10 + index)
    for index in range(2, 12):
        ledger.buffer(index)
    for index, reason in zip(range(3, 6), ABORTED, strict=True):
        ledger.retry(index, reason)
    for index, reason in zip(range(6, 9), DROPPED, strict=True):
        ledger.drop(index, reason)
    ledger.train(9)
    ledger.start(4)
    ledger.aborted(17, SURPLUS)
    return ledger


def live(ledger: Ledger, index: int, state: str, tokens: int) -> None:
    assert index in ledger._live
    ledger._live[index] = (state, tokens)


PLANTED = {
    "a draw too many": lambda ledger, at: ledger.__setattr__("drawn", ledger.drawn + 1),
    "a draw in two states": lambda ledger, at: ledger.draws.update([TRAINED]),
    "a draw in a state nobody knows": lambda ledger, at: ledger.draws.update(["lost"]),
    "a draw in the wrong state": lambda ledger, at: live(ledger, 1, BUFFERED, 11),
    "a draw forgotten": lambda ledger, at: ledger._live.pop(1),
    "counts that only sum up": lambda ledger, at: ledger.draws.update({BUFFERED: 1, IN_REWARD: -1}),
    "one that the buffer does not hold": lambda ledger, at: at.update({BUFFERED: -1}),
    "one that the buffer holds besides": lambda ledger, at: at.update({TO_RETRY: 1}),
    "tokens out of nothing": lambda ledger, at: ledger.tokens.update({TRAINED: 1}),
    "tokens that vanish": lambda ledger, at: ledger.tokens.update({"generated": 1}),
    "lost tokens not generated": lambda ledger, at: ledger.tokens.update({STOPPED: 5}),
    "tokens of a live draw in another's place": lambda ledger, at: ledger.tokens.update({BUFFERED: 5, TRAINED: -5}),
    "tokens of a live draw wrong": lambda ledger, at: live(ledger, 1, IN_REWARD, 12),
}


@pytest.mark.parametrize("plant", [pytest.param(plant, id=name) for name, plant in PLANTED.items()])
def test_check_notices(plant):
    ledger = busy_ledger()
    at = held(ledger)
    ledger.check(at)
    plant(ledger, at)
    with pytest.raises(AssertionError, match="drawn"):
        ledger.check(at)


def test_a_ledger_comes_back_from_json_with_its_live_draws():
    ledger = busy_ledger()
    stopped = copy.deepcopy(ledger)
    for index in (0, 1, 4):  # what runs goes back, as the buffer does before it writes
        stopped.retry(index, STOPPED)
    again = Ledger()
    state = json.loads(json.dumps(stopped.state()))
    again.restore(state, to_retry=[0, 1, 3, 4, 5], buffered={2: 12, 10: 20, 11: 21})
    again.check({TO_RETRY: 5, BUFFERED: 3})
    assert again.metrics() == stopped.metrics() and again.drawn == 12
    for index in (2, 10, 11):
        again.train(index)
    again.start(0)
    again.check({IN_GENERATION: 1, TO_RETRY: 4})
    assert again.tokens[TRAINED] == 19 + 12 + 20 + 21
    assert ledger.draws[IN_REWARD] == 1, "the running ledger is its own"


def test_a_restored_ledger_notices_what_does_not_fit():
    state = busy_ledger().state()
    again = Ledger()
    again.restore(state, to_retry=[3, 5], buffered={2: 12})
    with pytest.raises(AssertionError):
        again.check({TO_RETRY: 2, BUFFERED: 1})


@pytest.mark.parametrize("settle", [False, True])
def test_the_shares_of_all_generated_tokens_sum_to_one(settle):
    rng = random.Random(3)
    ledger = Ledger()
    for index in range(300):
        tokens, end = rng.randrange(1, 50), rng.random()
        ledger.start(index)
        if end < 0.1:
            ledger.retry(index, SURPLUS)
            ledger.aborted(tokens, SURPLUS)
            continue
        ledger.generated(index, tokens)
        if end < 0.2 and not settle:
            continue
        ledger.buffer(index)
        if end < 0.4:
            ledger.retry(index, rng.choice(ABORTED))
        elif end < 0.6:
            ledger.drop(index, rng.choice(DROPPED))
        elif end < 0.9 or settle:
            ledger.train(index)
    metrics = ledger.metrics()
    shares = {name: value for name, value in metrics.items() if "goodput" in name or "dropped_" in name}
    shares |= {name: value for name, value in metrics.items() if "wasted_" in name}
    assert len(shares) == 7 and all(value > 0 for name, value in shares.items())
    waiting = sum(ledger.tokens[state] for state in LIVE) / ledger.tokens["generated"]
    assert sum(shares.values()) + waiting == pytest.approx(1.0)
    assert (waiting == 0) == settle
    assert sum(metrics[f"ledger/draws_{state}"] for state in (*LIVE, TRAINED, *DROPPED)) == metrics["ledger/drawn"]


def test_an_unused_ledger_has_metrics():
    metrics = Ledger().metrics()
    assert metrics["ledger/goodput"] == 1.0 and metrics["ledger/drawn"] == 0
    assert all(value == 0 for name, value in metrics.items() if name != "ledger/goodput")
