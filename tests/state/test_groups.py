"""Groups that finished after a checkpoint, when a run goes on from it: which count, and that they change nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from dapo.sampling.draws import BufferState
from dapo.state.groups import FILE, newest_policy, note, read_groups, recover, write_groups
from dapo.state.journal import Journal
from dapo.types import Draw, Group, VersionSpan
from tests.support.engines.played import assert_support, support_of
from tests.support.fakes import make_group, make_prompt, make_response
from tests.support.sampling.verdicts import draw_of


def group_of(index: int, *versions: int) -> Group:
    """Its last response has a span per version."""
    group = make_group(index, [1.0, 0.0])
    spans = tuple(VersionSpan(version=v, start=k, end=k + 1) for k, v in enumerate(versions))
    return replace(group, responses=(make_response(4), replace(make_response(len(spans)), policy_versions=spans)))


def journal_of(tmp_path: Path, warnings: list[str] | None = None) -> Journal:
    return Journal(tmp_path, "", warn=(warnings if warnings is not None else []).append)


def recovered(tmp_path: Path, state: BufferState, held: int, version: int, draw=draw_of) -> list[tuple[int, int]]:
    journal = journal_of(tmp_path)
    found = recover(journal, state, held, draw, version=version)
    journal.close()
    return [(group.draw.index, started) for group, started in found]


STATE = BufferState(retry=[7, 9], draws={"trained": 6}, tokens={}, rate=[1.0, 1.0])  # and 6 and 8 are held


def fill(tmp_path: Path, version: int, *groups: tuple[Group, int]) -> None:
    journal = journal_of(tmp_path)
    journal.begin(version)
    for group, started in groups:
        note(journal, group, started)
    journal.close()


def test_groups_of_a_policy_that_a_resumed_run_has_not_are_not_even_written(tmp_path):
    """Also those of which only the last tokens are."""
    fill(tmp_path, 5, (group_of(7, 4, 5), 4), (group_of(9, 5, 6), 5), (group_of(12, 6), 6), (group_of(13, 5), 5))
    assert len(journal_of(tmp_path).read(5)) == 2
    assert recovered(tmp_path, STATE, 2, 5) == [(7, 4), (13, 5)]


def test_groups_of_a_later_policy_are_discarded_where_an_older_checkpoint_is_taken(tmp_path):
    fill(tmp_path, 5, (group_of(7, 5), 5))
    fill(tmp_path, 8, (group_of(9, 5, 7), 5), (group_of(12, 8), 8), (group_of(13, 5), 5))
    assert recovered(tmp_path, STATE, 2, 5) == [(7, 5), (13, 5)]
    assert [path.name for path in tmp_path.iterdir()] == ["after_000005.log"]
    assert recovered(tmp_path, STATE, 2, 5) == [(7, 5), (13, 5)], "a second crash loses nothing"


def test_groups_of_other_prompts_are_left_out(tmp_path):
    fill(tmp_path, 5, (group_of(7, 5), 5), (group_of(12, 5), 5))

    def other(index: int) -> Draw:
        return Draw(index=index, prompt=make_prompt(index + (index == 7)))

    assert recovered(tmp_path, STATE, 2, 5, draw=other) == [(12, 5)]


def test_a_group_comes_out_as_it_went_in(tmp_path):
    rng = np.random.default_rng(0)
    response = replace(
        make_response(0),
        token_ids=rng.integers(0, 2**31 - 1, 5000).astype(np.int32),
        rollout_logprobs=rng.normal(size=5000).astype(np.float32),
        text="\0 ∑ \x7f" * 9,
        policy_versions=(VersionSpan(version=2, start=0, end=7), VersionSpan(version=3, start=7, end=5000)),
        support=support_of(range(5000)),
        experts=rng.integers(0, 255, (5003, 3, 4)).astype(np.uint8),
    )
    many = rng.integers(0, 1000, (6, 3, 4)).astype(np.uint16)
    other = replace(make_response(3), experts=many, support=replace(support_of([4, 2, 9]), logprobs=None))
    group = replace(make_group(7, [1.0, float("nan"), 0.0]), responses=(response, make_response(0), other))
    write_groups(tmp_path / FILE, [(group, 2)])
    ((back, started),) = read_groups(tmp_path / FILE, draw_of, check=True)
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
    assert_support(back.responses[0].support, range(5000))
    assert back.responses[1].support is None and back.responses[1].experts is None
    for place in (0, 2):
        found, wanted = back.responses[place].experts, group.responses[place].experts
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    support = back.responses[2].support
    assert support.logprobs is None and support.counts.tolist() == other.support.counts.tolist()
    assert support.token_ids.tolist() == other.support.token_ids.tolist()
    assert repr(back.scores) == repr(group.scores)
