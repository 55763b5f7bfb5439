"""The oversampling buffer under random schedules: the books balance, every step trains on what is due."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dapo.algorithm.fate import TRAINED
from dapo.algorithm.outcome import ALL_CORRECT, ALL_WRONG, MIXED, UNSCORABLE
from dapo.sampling.buffer import DRAW_ORDER
from tests.support.sampling.buffer_world import IN_GENERATION, IN_REWARD, TO_RETRY, World
from tests.support.sampling.verdicts import Verdict, verdicts

SEEDS = st.integers(0, 10**6)
# A world of a hundred events shrinks for minutes.
WORLDS = settings(phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
FEW = settings(WORLDS, max_examples=settings.default.max_examples // 2)
SELDOM = ["late", "late", "stop", "resize", "refuse", "crash", "crash", "checkpoint"]
MOVES = ["score"] * 30 + ["generate"] * 8 + ["close"] * 10 + ["update"] * 7 + SELDOM
ROOMS = st.sampled_from([None, None, None, 0, 1, 3])
EVENTS = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 30), ROOMS), min_size=40, max_size=120)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("state")


def endless(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.randrange(1000)


@st.composite
def some_options(draw) -> dict:
    width = draw(st.sampled_from([1, 2, 3, 4, 6, 10, 20]))
    batches, on_budget = draw(st.sampled_from([(0, "fail"), (1, "fail"), (1, "train_partial"), (3, "train_partial")]))
    return {
        "train_batch_size": draw(st.integers(1, 6)),
        "max_in_flight": width,
        "filter_groups": draw(st.sampled_from([True, True, True, False])),
        "max_staleness": draw(st.integers(0, 3)),
        "max_draws": batches * width,
        "on_budget": on_budget,
    }


def move(world: World, kind: str, pick: int, room: int | None) -> None:
    """One event, where it can happen."""
    running, waiting = world.at(IN_GENERATION, IN_REWARD), world.at(IN_GENERATION)
    gone = [*world.closed, *world.at(TO_RETRY, TRAINED, ALL_CORRECT, ALL_WRONG, UNSCORABLE)]
    if kind == "score" and running:
        world.score(running[pick % len(running)])
    elif kind == "generate" and waiting:
        world.generate(waiting[pick % len(waiting)])
    elif kind == "close" and world.buffer.collecting and world.buffer.full:
        world.close()
    elif kind == "late" and gone:
        world.late(gone[pick % len(gone)])
    elif kind == "refuse" and world.closed:
        world.refuse()
    elif kind == "resize":
        world.stop(train_batch_size=1 + pick % 5, max_staleness=pick % 4)
    elif kind in ("update", "stop", "crash", "checkpoint"):
        getattr(world, kind)()
    world.audit()
    world.take(room)
    world.audit()


@pytest.mark.parametrize("admission", [DRAW_ORDER, "completion"])
@WORLDS
@given(options=some_options(), share=st.sampled_from([0.5, 0.3, 0.8, 1.0, 0.05, 0.0]), seed=SEEDS, events=EVENTS)
def test_the_books_balance_at_every_event(tmp_path_factory, admission, options, share, seed, events):
    """And no draw is trained twice, too old, out of order or left out, and the buffer never waits for nothing."""
    world = World(tmp_path_factory.mktemp("journal"), verdicts(seed, share), admission=admission, **options)
    world.checkpoint()
    world.take()
    for event in events:
        move(world, *event)
    world.crash()
    world.run(endless(seed), until=len(world.steps) + 3, at_most=100)
    used = [index for step in world.steps for index in step]
    assert len(used) == len(set(used))
    if world.in_order:
        assert used == list(range(len(used)))
    world.close_journal()


def due(verdict: Verdict, batch: int, steps: int) -> list[list[int]]:
    """What each step uses up at staleness 0: from the verdicts alone."""
    used: list[list[int]] = [[]]
    index = found = 0
    while len(used) <= steps:
        used[-1].append(index)
        found += verdict(index, len(used) - 1) == MIXED
        if found == batch:
            used.append([])
            found = 0
        index += 1
    return used[:-1]


@pytest.mark.parametrize("batches", [0, 2])
@WORLDS
@given(
    seed=SEEDS,
    share=st.sampled_from([0.2, 0.5, 1.0]),
    batch=st.integers(1, 5),
    width=st.integers(1, 16),
    ends=st.lists(st.tuples(st.integers(0, 25), st.sampled_from(["crash", "checkpoint", "stop"])), max_size=5),
)
def test_at_staleness_0_a_step_depends_on_the_verdicts_alone(
    tmp_path_factory, batches, seed, share, batch, width, ends
):
    """Whatever finishes first, however many run at once, wherever the run ends and goes on. Also where the budget of a
    step is spent: what was drawn before counts towards it, whether a checkpoint in mid-step or the journal has it."""
    verdict = verdicts(seed % 5, share)
    options = {"train_batch_size": batch, "max_in_flight": width, "max_draws": batches * width}
    options["on_budget"] = "train_partial"
    folder = tmp_path_factory.mktemp("journal")
    straight = World(folder / "straight", verdict, **options)
    straight.run(endless(seed), until=4, at_most=1000)
    world = World(folder, verdict, **options)
    world.checkpoint()
    for groups, end in ends:
        world.run(endless(seed + groups), until=4, at_most=groups)
        getattr(world, end)()
    world.run(endless(seed + 1), until=4, at_most=1000)
    if straight.exhausted == world.exhausted == 0:
        assert world.steps == straight.steps
    if batches == 0:
        assert world.steps == due(verdict, batch, 4)
    world.close_journal()


@FEW
@given(
    seed=SEEDS,
    share=st.sampled_from([0.3, 1.0]),
    width=st.integers(1, 16),
    refused=st.lists(st.integers(0, 3), max_size=6),
    staleness=st.integers(0, 2),
)
def test_a_batch_that_is_refused_comes_again_and_its_tokens_are_wasted_as_refused(
    directory, seed, share, width, refused, staleness
):
    verdict = verdicts(seed % 5, share)
    world = World(directory, verdict, max_in_flight=width, max_staleness=staleness)
    tokens = 0
    for step in sorted(refused):
        world.run(endless(seed), until=step + 1, at_most=1000)
        used = world.steps[-1]
        tokens += sum(world.size[index] for index in used)
        world.refuse()
        world.audit()
        assert world.at(TO_RETRY)[: len(used)] == used, "in draw order, before all that is new"
        metrics = world.buffer.metrics()
        assert metrics["ledger/wasted_refused"] == pytest.approx(tokens / metrics["ledger/tokens_generated"])
    world.run(endless(seed + 1), until=5, at_most=1000)
    used = [index for step in world.steps for index in step]
    assert used == list(range(len(used)))
    if staleness == 0:
        assert world.steps == due(verdict, 3, 5)


@FEW
@given(seed=SEEDS, width=st.integers(3, 12), partial=st.booleans())
def test_a_budget_ends_a_step_exactly_where_its_draws_hold_no_batch(directory, seed, width, partial):
    verdict = verdicts(seed, 0.3)
    on_budget = "train_partial" if partial else "fail"
    world = World(directory, verdict, max_in_flight=width, max_draws=2 * width, on_budget=on_budget)
    world.run(endless(seed), until=1, at_most=2 * width + 2)
    first = due(verdict, 3, 1)[0]
    enough = len(first) <= 2 * width
    some = any(verdict(index, 0) == MIXED for index in range(2 * width))
    assert (world.exhausted == 0) == (enough or (partial and some))
    if world.exhausted == 0:
        assert world.steps == [first if enough else list(range(2 * width))]


@pytest.mark.parametrize("max_draws", [pytest.param(0, id="no budget"), pytest.param(24, id="budget")])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_stops_while_it_waits_for_a_straggler_goes_on(directory, staleness, max_draws):
    """The batch is there but for the first draw, the most likely moment to be stopped in with long-tailed lengths."""
    world = World(directory, lambda index, version: MIXED, max_in_flight=12, max_draws=max_draws)
    for index in world.take()[1:]:
        world.score(index)
    while ahead := world.take():
        for index in ahead:
            world.score(index)
    world.stop(train_batch_size=2, max_staleness=staleness)
    assert world.take()[:1] == [0]
    world.score(0)
    world.close()
    assert world.steps == [[0, 1]] and world.exhausted == 0


def test_gaps_that_a_stop_left_are_closed_even_beyond_the_budget(directory):
    """Six draws that ran at the stop stand before six that are held; the continued run may start four per update."""
    world = World(directory, lambda index, _: MIXED if index > 5 else ALL_WRONG, train_batch_size=7, max_in_flight=12)
    for index in world.take()[6:]:
        world.score(index)
    world.stop(max_in_flight=4, max_draws=4, on_budget="train_partial")
    world.run(endless(0), until=1, at_most=20)
    assert world.steps == [list(range(12))] and world.exhausted == 0


def test_what_goes_back_at_the_end_of_a_step_is_no_reason_to_start_more_than_is_missing(directory):
    world = World(directory, lambda index, version: MIXED, max_in_flight=12)
    for index in world.take()[:3]:
        world.score(index)
    world.close()
    assert len(world.at(TO_RETRY)) > 3
    while not world.buffer.collecting:
        world.update()
    world.buffer.rate.restore([1e6, 1e6])
    assert world.take() == [3, 4, 5]
