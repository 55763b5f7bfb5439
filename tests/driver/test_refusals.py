"""Batches that must not be trained on: what is set aside, what comes again, and when the run ends."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from dapo.algorithm.batch import build_batch
from dapo.config.schema import Config
from dapo.driver.refusals import MAX_IN_A_ROW, NotFinite, Refusals
from dapo.pools import BatchRefused, Updated
from dapo.sampling.buffer import OversamplingBuffer
from dapo.state import quarantine
from dapo.state.groups import FILE, read_groups
from dapo.state.quarantine import QUARANTINE, WHY
from dapo.state.voided import Voided
from dapo.types import Collected, Group
from tests.support.fakes import make_group
from tests.support.sampling.verdicts import draw_of

GROUPS = 6
PARITY = BatchRefused("parity", "probabilities differ")
TRAINED = Updated(metrics={})


def config() -> Config:
    cfg = Config()
    cfg.data.train_batch_size, cfg.data.gen_batch_size, cfg.actor.ppo_mini_batch_size = GROUPS, 8, 2
    cfg.actor.shuffle = True
    return cfg


class Collecting:
    """A buffer that is filled with mixed groups, one draw without signal and one with a NaN among them, and what
    refuses its batches."""

    def __init__(self, path: Path) -> None:
        self.buffer = OversamplingBuffer.of(config())
        self.refusals = Refusals(config(), path, self.buffer, Voided(path, warn=pytest.fail))
        self.root = path / QUARANTINE

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
        group = make_group(index, [1.0, 1.0] if index == 2 else [1.0, 0.0])
        if index != 3:
            return group
        broken = replace(group.responses[0], rollout_logprobs=np.full(4, np.nan, np.float32))
        return replace(group, responses=(broken, *group.responses[1:]))

    def train(self, collected: Collected, updated: Updated = TRAINED) -> None:
        version = self.buffer.version
        self.buffer.trained()
        self.buffer.serving(version + 1)
        self.refusals.updated(collected, updated, version)

    def entries(self) -> list[str]:
        return sorted(entry.name for entry in self.root.iterdir()) if self.root.exists() else []

    def read(self) -> tuple[str, dict, list[tuple[Group, int]]]:
        """The name of the only entry, what it says, and its groups with the version at the start of each."""
        [name] = self.entries()
        why = json.loads((self.root / name / WHY).read_text())
        return name, why, read_groups(self.root / name / FILE, draw_of, check=True)


@pytest.fixture
def world(tmp_path: Path) -> Collecting:
    return Collecting(tmp_path)


def draws(groups) -> list[int]:
    return [group.draw.index for group in groups]


def test_a_refused_batch_is_set_aside_and_its_draws_come_again(world, capsys):
    first = world.collect()
    world.refusals.refused(first, PARITY, 0)
    again = world.collect()
    assert draws(again.drawn) == draws(first.drawn) == list(range(7)), "what had no signal comes again too"
    name, why, groups = world.read()
    assert name == "step_000000-parity"
    assert (why["version"], why["reason"], why["message"]) == (0, "parity", "probabilities differ")
    assert [(group.draw.index, started) for group, started in groups] == [(k, 0) for k in draws(first.groups)]
    assert why["draws"] == draws(first.groups)
    assert f"a batch was set aside (1 in a row; {MAX_IN_A_ROW} end the run)" in capsys.readouterr().err

    rebuilt = build_batch([group for group, _ in groups], config(), version=0)
    wanted = build_batch(first.groups, config(), version=0)
    assert rebuilt.order == wanted.order
    for ours, theirs in zip(rebuilt.minibatches, wanted.minibatches, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            for field in fields(one):
                np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))
    assert any(np.isnan(s.rollout_logprobs).any() for minibatch in rebuilt.minibatches for s in minibatch)


def test_refusals_in_a_row_end_the_run_and_nothing_of_them_is_lost(world):
    for _ in range(MAX_IN_A_ROW - 1):
        world.refusals.refused(world.collect(), PARITY, 0)
    last = world.collect()
    with pytest.raises(BatchRefused) as raised:
        world.refusals.refused(last, PARITY, 0)
    assert raised.value is PARITY
    assert world.entries() == ["step_000000-parity", *(f"step_000000-parity-{k}" for k in range(2, MAX_IN_A_ROW + 1))]
    assert draws(world.collect().drawn) == draws(last.drawn)


def test_an_update_in_between_ends_the_row(world):
    world.train(world.collect())
    assert world.entries() == []
    for version in range(1, 3):
        for _ in range(MAX_IN_A_ROW - 1):
            world.refusals.refused(world.collect(), PARITY, version)
        world.train(world.collect())
    assert len(world.entries()) == 2 * (MAX_IN_A_ROW - 1)
    assert world.buffer.draws.counts["trained"] == 3 * GROUPS


@pytest.mark.parametrize("skipped", [(0,), (1,), (2,), (0, 2)])
def test_the_groups_of_skipped_mini_batches_are_set_aside_and_no_others(world, skipped):
    """The dealing is shuffled: mini-batch k does not hold the groups 2k and 2k + 1."""
    world.train(world.collect())  # another version, another dealing
    collected = world.collect()
    batch = build_batch(collected.groups, config(), version=1)
    wanted = sorted({int(s.token_ids[2]) - 3 for k in skipped for s in batch.minibatches[k]})  # prompts name draws
    world.train(collected, Updated(metrics={"actor/loss": math.nan, "a": 1.0}, skipped=skipped))
    name, why, groups = world.read()
    assert name == "step_000001-nonfinite" and why["version"] == 1
    assert sorted(group.draw.index for group, _ in groups) == wanted and len(wanted) == 2 * len(skipped)
    assert str(list(skipped)) in why["message"]


def test_too_many_skipped_steps_end_the_run(world):
    with pytest.raises(NotFinite, match="5 steps in a row were skipped"):
        world.train(world.collect(), Updated(metrics={}, skipped=(1,), stop="5 steps in a row were skipped"))
    _, why, groups = world.read()
    assert why["message"] == "5 steps in a row were skipped" and len(groups) == 2
    assert world.buffer.draws.counts["trained"] == GROUPS, "the update counts"


@pytest.mark.parametrize("failure", ["no folder", "half"])
def test_a_disk_that_refuses_the_groups_ends_no_run(failure, world, monkeypatch, caplog):
    def full(file, groups):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    if failure == "half":
        monkeypatch.setattr(quarantine, "write_groups", full)
    else:
        world.root.write_text("in the way")
    first = world.collect()
    world.refusals.refused(first, PARITY, 0)
    assert draws(world.collect().drawn) == draws(first.drawn)
    assert "groups of step 0 could not be set aside" in caplog.text
    assert failure != "half" or world.entries() == []


def test_only_the_newest_entries_are_kept_each_with_its_reason(world, monkeypatch):
    monkeypatch.setattr(quarantine, "KEEP", 3)
    for version in range(9, 14):
        world.train(world.collect())
        world.refusals.refused(world.collect(), BatchRefused("nonfinite", "nothing was taken"), version)
    assert world.entries() == [f"step_0000{version}-nonfinite" for version in (11, 12, 13)]
