"""What is set aside can be read again, and making a batch of it gives the same batch; no failure ends a run."""

import dataclasses
import json
import logging
import math

import numpy as np
import pytest

from dapo.batch import build_batch, deal
from dapo.config.schema import Config
from dapo.state.quarantine import set_aside
from tests.support.fakes import make_group
from tests.support.state.quarantined import read_quarantined


def make_groups(count=4):
    return [make_group(index, [1.0, 0.0, index % 2]) for index in range(count)]


def put(folder, version=7, reason="nonfinite"):
    held = [(group, version) for group in make_groups()]
    return set_aside(folder, held, version=version, reason=reason, message="why", metrics={})


def test_the_same_batch_can_be_made_again(tmp_path):
    cfg = Config()
    cfg.actor.ppo_mini_batch_size = 2
    groups = make_groups()
    broken = dataclasses.replace(groups[1].responses[0], rollout_logprobs=np.full(4, np.nan, np.float32))
    groups[1] = dataclasses.replace(groups[1], responses=(broken, *groups[1].responses[1:]))
    path = set_aside(
        tmp_path,
        [(group, 6) for group in groups],
        version=7,
        reason="nonfinite",
        message="why",
        metrics={"a": 1.0, "b": math.nan},
    )
    assert path == tmp_path / "quarantine" / "step_000007-nonfinite"
    found = read_quarantined(path)
    assert (found.version, found.reason, found.message) == (7, "nonfinite", "why")
    assert found.metrics == {"a": 1.0, "b": None}
    assert [started for _, started in found.groups] == [6] * 4
    wanted = build_batch(groups, cfg, version=7)
    again = build_batch([group for group, _ in found.groups], cfg, version=7)
    assert again.order == wanted.order
    for ours, theirs in zip(again.minibatches, wanted.minibatches, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            for field in dataclasses.fields(one):
                np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))
    assert [group.draw.prompt.text for group, _ in found.groups] == ["0", "1", "2", "3"]
    why = json.loads((path / "why.json").read_text())
    assert why["draws"] == [0, 1, 2, 3] and why["config"] == str(tmp_path / "config.yaml")


def test_the_groups_of_a_mini_batch_are_found():
    cfg = Config()
    cfg.actor.ppo_mini_batch_size = 2
    groups = make_groups(6)
    batch = build_batch(groups, cfg, version=3)
    dealt, order = deal(6, cfg, version=3)
    assert order == batch.order and sorted(i for chosen in dealt for i in chosen) == list(range(6))
    for chosen, minibatch in zip(dealt, batch.minibatches, strict=True):
        prompts = [groups[i].draw.prompt.token_ids.tolist() for i in chosen for _ in range(3)]
        assert [sequence.token_ids[:3].tolist() for sequence in minibatch] == prompts


def test_a_second_entry_of_a_step_does_not_replace_the_first(tmp_path):
    assert [put(tmp_path).name for _ in range(3)] == [f"step_000007-nonfinite{end}" for end in ("", "-2", "-3")]


def test_only_the_newest_entries_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo.state.quarantine.KEEP", 3)
    for version in range(9, 14):
        put(tmp_path, version)
    names = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert names == [f"step_0000{version}-nonfinite" for version in (11, 12, 13)]


def test_what_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "quarantine").write_text("no directory")
    with caplog.at_level(logging.WARNING):
        assert put(tmp_path) is None
    assert "groups of step 7 could not be set aside" in caplog.text


def test_half_an_entry_is_not_left(tmp_path, monkeypatch):
    def full(directory, groups):
        (directory / "groups.parquet").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dapo.state.quarantine.write_groups", full)
    assert put(tmp_path) is None
    assert list((tmp_path / "quarantine").iterdir()) == []


@pytest.mark.parametrize("reason", ["parity", "nonfinite"])
def test_the_reason_is_in_the_name(tmp_path, reason):
    assert put(tmp_path, reason=reason).name == f"step_000007-{reason}"
