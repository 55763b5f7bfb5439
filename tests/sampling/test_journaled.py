"""Groups that finished after a checkpoint, when a run goes on from it: which count, and that they change nothing."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dapo.sampling.buffer import DRAW_ORDER
from dapo.sampling.draws import BufferState
from dapo.sampling.journaled import newest_policy, note, recover
from dapo.sampling.outcome import ALL_WRONG
from dapo.sampling.saved import decode_group, encode_group
from dapo.state.journal import Journal
from dapo.types import Draw, Group, VersionSpan
from tests.sampling.test_buffer_properties import due, endless, move, some_sizes
from tests.support.fakes import make_group, make_prompt, make_response
from tests.support.sampling.journaled_world import JournaledWorld
from tests.support.sampling.verdicts import draw_of, verdicts

MOVES = ["score"] * 30 + ["generate"] * 8 + ["close"] * 10 + ["update"] * 9 + ["stop", "crash", "crash", "checkpoint"]
EVENTS = st.lists(
    st.tuples(st.sampled_from(MOVES), st.integers(0, 30), st.sampled_from([None, None, 0, 3])),
    min_size=40,
    max_size=120,
)
SEEDS = st.integers(0, 10**6)


@pytest.fixture
def directory(tmp_path_factory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("journal")


def crash_or_move(world: JournaledWorld, kind: str, pick: int, room: int | None) -> None:
    if kind == "crash":
        world.crash()
    elif kind == "checkpoint":
        world.checkpoint()
    move(world, kind, pick, room)


@pytest.mark.parametrize("admission", [DRAW_ORDER, "completion"])
@pytest.mark.parametrize("on_budget", ["none", "fail", "train_partial"])
@settings(
    phases=[Phase.explicit, Phase.generate], deadline=None, max_examples=15, suppress_health_check=list(HealthCheck)
)
@given(sizes=some_sizes(), share=st.sampled_from([0.5, 0.3, 0.8, 1.0]), seed=SEEDS, events=EVENTS)
def test_the_books_balance_after_every_crash(tmp_path_factory, admission, on_budget, sizes, share, seed, events):
    """Every draw is there once, of the right age, trained on at most once, with the tokens that it had."""
    batches = 0 if on_budget == "none" else 2
    budget = {"max_draws": batches * sizes["max_in_flight"], "on_budget": "fail" if not batches else on_budget}
    folder = tmp_path_factory.mktemp("journal")
    world = JournaledWorld(folder, verdicts(seed, share), admission=admission, **sizes, **budget)
    world.checkpoint()
    world.take()
    for event in events:
        crash_or_move(world, *event)
    world.crash()
    world.run(endless(seed), until=len(world.steps) + 2, at_most=60)
    used = [index for step in world.steps for index in step]
    assert len(used) == len(set(used))
    if world.in_order:
        assert used == list(range(len(used)))
    world.close_journal()


@pytest.mark.parametrize("batches", [0, 2])
@settings(
    phases=[Phase.explicit, Phase.generate], deadline=None, max_examples=25, suppress_health_check=list(HealthCheck)
)
@given(
    seed=SEEDS,
    share=st.sampled_from([0.2, 0.5, 1.0]),
    batch=st.integers(1, 5),
    width=st.integers(1, 16),
    ends=st.lists(st.tuples(st.integers(0, 25), st.booleans()), min_size=1, max_size=5),
)
def test_at_staleness_0_crashes_and_journal_change_no_step(tmp_path_factory, batches, seed, share, batch, width, ends):
    """Also where the budget of a step is spent: what was drawn before the crash counts towards it, whether a checkpoint
    in mid-step or the journal has it."""
    verdict = verdicts(seed % 5, share)
    options = {"train_batch_size": batch, "max_in_flight": width, "max_draws": batches * width}
    options["on_budget"] = "train_partial"
    folder = tmp_path_factory.mktemp("journal")
    straight = JournaledWorld(folder / "straight", verdict, **options)
    straight.run(endless(seed), until=4, at_most=1000)
    world = JournaledWorld(folder, verdict, **options)
    world.checkpoint()
    for groups, crash in ends:
        world.run(endless(seed + groups), until=4, at_most=groups)
        if crash:
            world.crash()
        else:
            world.checkpoint()
    world.run(endless(seed + 1), until=4, at_most=1000)
    if straight.exhausted == world.exhausted == 0:
        assert world.steps == straight.steps
    if batches == 0:
        assert world.steps == due(verdict, batch, 4)
    world.close_journal()


def test_a_crash_in_a_step_generates_no_finished_group_again(directory):
    world = JournaledWorld(directory, verdicts(0, 1.0), train_batch_size=6, max_in_flight=8)
    world.checkpoint()
    for index in world.take()[1:6]:
        world.score(index)
    assert world.crash() == [1, 2, 3, 4, 5]
    assert world.take()[0] == 0
    world.score(0)
    world.crash()
    assert world.buffer.full
    world.close()
    assert world.steps == [[0, 1, 2, 3, 4, 5]]
    world.close_journal()


def group_of(index: int, *versions: int) -> Group:
    """Its last response has a span per version."""
    group = make_group(index, [1.0, 0.0])
    spans = tuple(VersionSpan(version=v, start=k, end=k + 1) for k, v in enumerate(versions))
    return replace(group, responses=(make_response(4), replace(make_response(len(spans)), policy_versions=spans)))


def journal_of(directory: Path, warnings: list[str] | None = None) -> Journal:
    return Journal(directory, "", warn=(warnings if warnings is not None else []).append)


def recovered(directory: Path, state: BufferState, held: int, version: int, draw=draw_of) -> list[tuple[int, int]]:
    journal = journal_of(directory)
    found = recover(journal, state, held, draw, version=version)
    journal.close()
    return [(group.draw.index, started) for group, started in found]


STATE = BufferState(retry=[7, 9], draws={"trained": 6}, tokens={}, rate=[1.0, 1.0])  # and 6 and 8 are held


def fill(directory: Path, version: int, *groups: tuple[Group, int]) -> None:
    journal = journal_of(directory)
    journal.begin(version)
    for group, started in groups:
        note(journal, group, started)
    journal.close()


def test_what_the_checkpoint_awaits_counts(directory):
    fill(directory, 5, *[(group_of(index, 5), 5) for index in (3, 6, 7, 8, 9, 13, 11, 12)])
    assert recovered(directory, STATE, 2, 5) == [(7, 5), (9, 5), (11, 5), (12, 5), (13, 5)]


def test_groups_of_a_policy_that_a_resumed_run_has_not_are_not_even_written(directory):
    """Also those of which only the last tokens are."""
    fill(directory, 5, (group_of(7, 4, 5), 4), (group_of(9, 5, 6), 5), (group_of(12, 6), 6), (group_of(13, 5), 5))
    assert len(journal_of(directory).read(5)) == 2
    assert recovered(directory, STATE, 2, 5) == [(7, 4), (13, 5)]


def test_groups_of_a_later_policy_are_discarded_where_an_older_checkpoint_is_taken(directory):
    fill(directory, 5, (group_of(7, 5), 5))
    fill(directory, 8, (group_of(9, 5, 7), 5), (group_of(12, 8), 8), (group_of(13, 5), 5))
    assert recovered(directory, STATE, 2, 5) == [(7, 5), (13, 5)]
    assert [path.name for path in directory.iterdir()] == ["after_000005.log"]
    assert recovered(directory, STATE, 2, 5) == [(7, 5), (13, 5)], "a second crash loses nothing"


def test_groups_that_finished_before_the_checkpoint_are_not_taken_again(directory):
    """A draw that went back is among those that start again; its old group was too old or too many."""
    fill(directory, 4, (group_of(7, 4), 4))
    assert recovered(directory, STATE, 2, 5) == []
    assert [path.name for path in sorted(directory.iterdir())] == ["after_000004.log", "after_000005.log"]


def test_of_a_draw_that_came_twice_the_last_group_counts(directory):
    fill(directory, 5, (group_of(7, 4), 4), (group_of(7, 5), 5))
    assert recovered(directory, STATE, 2, 5) == [(7, 5)]


def test_groups_of_other_prompts_are_left_out(directory):
    fill(directory, 5, (group_of(7, 5), 5), (group_of(12, 5), 5))

    def other(index: int) -> Draw:
        return Draw(index=index, prompt=make_prompt(index + (index == 7)))

    assert recovered(directory, STATE, 2, 5, draw=other) == [(12, 5)]


def test_a_group_comes_out_as_it_went_in():
    rng = np.random.default_rng(0)
    response = replace(
        make_response(0),
        token_ids=rng.integers(0, 2**31 - 1, 5000).astype(np.int32),
        rollout_logprobs=rng.normal(size=5000).astype(np.float32),
        text="\0 ∑ \x7f" * 9,
        policy_versions=(VersionSpan(version=2, start=0, end=7), VersionSpan(version=3, start=7, end=5000)),
    )
    group = replace(make_group(7, [1.0, float("nan")]), responses=(response, make_response(0)))
    back, started = decode_group(encode_group(group, 2), draw_of)
    assert started == 2 and newest_policy(back) == 3 and back.draw.index == 7
    for one, other in zip(back.responses, group.responses, strict=True):
        assert one.token_ids.dtype == np.int32 and one.rollout_logprobs.dtype == np.float32
        assert one.token_ids.tobytes() == other.token_ids.tobytes()
        assert one.rollout_logprobs.tobytes() == other.rollout_logprobs.tobytes()
        assert (one.text, one.finish_reason, one.policy_versions) == (
            other.text,
            other.finish_reason,
            other.policy_versions,
        )
    assert repr(back.scores) == repr(group.scores)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_group_raise_a_value_error(seed):
    data = encode_group(make_group(3, [1.0, 0.0]), 0)
    rng = random.Random(seed)
    bad = [b"", data[: rng.randrange(8, len(data) - 20)], rng.randbytes(300)][seed % 3]
    with pytest.raises(ValueError):
        decode_group(bad, draw_of)


def test_what_was_drawn_before_a_crash_counts_towards_the_budget_of_its_step(directory):
    world = JournaledWorld(directory, lambda index, version: ALL_WRONG, max_in_flight=4, max_draws=8)
    world.checkpoint()
    for _ in range(2):
        for index in world.take():
            world.score(index)
        if len(world.where) == 4:
            world.crash()
    assert world.take() == [] and world.exhausted == 1 and len(world.where) == 8
    world.close_journal()
