"""Batches that must not be trained on: what is set aside, what comes again, and when the run ends."""

from dataclasses import replace

import pytest

from dapo.batch import build_batch
from dapo.config.schema import Config
from dapo.faults.refusals import MAX_IN_A_ROW, NotFinite, Refusals
from dapo.pools import BatchRefused, Updated
from dapo.sampling.buffer import OversamplingBuffer
from dapo.state.quarantine import QUARANTINE
from dapo.types import Collected, Group
from tests.support.fakes import make_group
from tests.support.state.quarantined import Quarantined, read_quarantined

GROUPS = 6
PARITY = BatchRefused("parity", "probabilities differ")


def config() -> Config:
    cfg = Config()
    cfg.data.train_batch_size, cfg.data.gen_batch_size, cfg.actor.ppo_mini_batch_size = GROUPS, 8, 2
    cfg.actor.shuffle = True
    return cfg


class Collecting:
    """A buffer that is filled with mixed groups, one draw without signal among them, and what refuses its batches."""

    def __init__(self, path) -> None:
        self.buffer = OversamplingBuffer.of(config())
        self.refusals = Refusals(config(), path, self.buffer)
        self.path = path

    def collect(self) -> Collected:
        self.buffer.open()
        while not self.buffer.full:
            taken = self.buffer.take()
            assert taken, "nothing runs and nothing starts"
            for index in taken:
                group = self.group(index)
                self.buffer.generated(index, group.num_tokens)
                self.buffer.add(group)
        return self.buffer.close()

    def group(self, index: int) -> Group:
        return make_group(index, [1.0, 1.0] if index == 2 else [1.0, 0.0])

    def train(self, collected: Collected, updated: Updated) -> None:
        """The trainer's part in an update."""
        version = self.buffer.version
        self.buffer.trained()
        self.buffer.serving(version + 1)
        self.refusals.updated(collected, updated, version)

    def entries(self) -> dict[str, Quarantined]:
        root = self.path / QUARANTINE
        return {entry.name: read_quarantined(entry) for entry in sorted(root.iterdir())} if root.exists() else {}


def draws(groups) -> list[int]:
    return [group.draw.index for group in groups]


def test_a_refused_batch_is_set_aside_and_its_draws_come_again(tmp_path, capsys):
    world = Collecting(tmp_path)
    first = world.collect()
    world.refusals.refused(first, PARITY, 0)
    again = world.collect()
    assert draws(again.drawn) == draws(first.drawn) == list(range(7)), "what had no signal comes again too"
    (name, entry), *others = world.entries().items()
    assert name == "step_000000-parity" and not others
    assert [(group.draw.index, started) for group, started in entry.groups] == [(k, 0) for k in draws(first.groups)]
    assert (entry.version, entry.reason, entry.message) == (0, "parity", "probabilities differ")
    cfg = config()
    rebuilt = build_batch([group for group, _ in entry.groups], cfg, version=0)
    for one, other in zip(rebuilt.minibatches, build_batch(first.groups, cfg, version=0).minibatches, strict=True):
        assert [s.token_ids.tolist() for s in one] == [s.token_ids.tolist() for s in other]
    assert f"a batch was set aside (1 in a row; {MAX_IN_A_ROW} end the run)" in capsys.readouterr().err


def test_refusals_in_a_row_end_the_run_and_nothing_of_them_is_lost(tmp_path):
    world = Collecting(tmp_path)
    for _ in range(MAX_IN_A_ROW - 1):
        world.refusals.refused(world.collect(), PARITY, 0)
    last = world.collect()
    with pytest.raises(BatchRefused) as raised:
        world.refusals.refused(last, PARITY, 0)
    assert raised.value is PARITY
    assert len(world.entries()) == MAX_IN_A_ROW, "each on its own"
    assert draws(world.collect().drawn) == draws(last.drawn)


def test_an_update_in_between_ends_the_row(tmp_path):
    world = Collecting(tmp_path)
    for version in range(3):
        for _ in range(MAX_IN_A_ROW - 1):
            world.refusals.refused(world.collect(), PARITY, version)
        world.train(world.collect(), Updated(metrics={}))
    assert len(world.entries()) == 3 * (MAX_IN_A_ROW - 1)
    assert world.buffer.draws.counts["trained"] == 3 * GROUPS


@pytest.mark.parametrize("skipped", [(0,), (1,), (2,), (0, 2)])
def test_the_groups_of_skipped_mini_batches_are_set_aside_and_no_others(tmp_path, skipped):
    """The dealing is shuffled: mini-batch k does not hold the groups 2k and 2k + 1."""
    world = Collecting(tmp_path)
    world.train(world.collect(), Updated(metrics={}))  # another version, another dealing
    collected = world.collect()
    batch = build_batch(collected.groups, config(), version=1)
    wanted = sorted({int(s.token_ids[2]) - 3 for k in skipped for s in batch.minibatches[k]})  # prompts name draws
    world.train(collected, Updated(metrics={"actor/loss": float("nan")}, skipped=skipped))
    (name, entry), *others = world.entries().items()
    assert name == "step_000001-nonfinite" and not others and entry.version == 1
    assert sorted(group.draw.index for group, _ in entry.groups) == wanted and len(wanted) == 2 * len(skipped)
    assert str(list(skipped)) in entry.message and entry.metrics == {"actor/loss": None}


def test_too_many_skipped_steps_end_the_run(tmp_path):
    world = Collecting(tmp_path)
    with pytest.raises(NotFinite, match="5 steps in a row were skipped"):
        world.train(world.collect(), Updated(metrics={}, skipped=(1,), stop="5 steps in a row were skipped"))
    (entry,) = world.entries().values()
    assert entry.message == "5 steps in a row were skipped" and len(entry.groups) == 2
    assert world.buffer.draws.counts["trained"] == GROUPS, "the update counts"


def test_an_update_without_fault_leaves_nothing(tmp_path):
    world = Collecting(tmp_path)
    world.train(world.collect(), Updated(metrics={}))
    assert not (tmp_path / QUARANTINE).exists()


def test_a_disk_that_refuses_the_groups_ends_no_run(tmp_path):
    (tmp_path / QUARANTINE).write_text("in the way")
    world = Collecting(tmp_path)
    first = world.collect()
    world.refusals.refused(first, PARITY, 0)
    assert draws(world.collect().drawn) == draws(first.drawn)


def test_a_refusal_that_is_not_parity_keeps_its_reason(tmp_path):
    world = Collecting(tmp_path)
    world.refusals.refused(replace(world.collect()), BatchRefused("nonfinite", "nothing was taken"), 4)
    assert list(world.entries()) == ["step_000004-nonfinite"]
