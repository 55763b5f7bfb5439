"""Every key of the configuration either alters what a run means or does not, and what differs is found."""

import copy
from dataclasses import asdict
from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.config.fields import ITEM, keys
from dapo.config.schema import Config
from dapo.state.changes import alters_meaning, changes, is_accepted

TINY = asdict(compose([], "dapo_tiny"))
JUDGED = asdict(
    compose(["reward.functions=[{path: judge}]", "reward.judge={url: 'http://h/v1', model: m}"], "dapo_tiny")
)
KEYS = {one.name: one.default for one in keys(Config) if ITEM not in one.name}


def test_every_key_has_a_known_class_and_an_unknown_key_counts():
    assert {one.resume for one in keys(Config)} == {"meaning", "course", "harmless"}
    assert alters_meaning("something.new")


MEANS = (
    "model.path model.lora.rank data.train_files data.max_response_length data.shuffle rollout.n rollout.temperature "
    "filter_groups.enable filter_groups.max_staleness reward.functions reward.overlong_buffer.len "
    "algorithm.policy_loss algorithm.clip_ratio_high actor.ppo_mini_batch_size trainer.seed"
)
MEANS_NOTHING = (
    "actor.optim.lr trainer.total_steps checkpoint.every eval.n data.val_files rollout.num_engines reward.num_workers "
    "reward.limits.wall_s actor.max_tokens_per_gpu weight_sync.max_mean_logprob_diff filter_groups.on_budget"
)


@pytest.mark.parametrize(("listed", "alters"), [(MEANS, True), (MEANS_NOTHING, False)], ids=["meaning", "harmless"])
def test_which_keys_alter_the_meaning(listed, alters):
    assert {key: alters_meaning(key) for key in listed.split()} == dict.fromkeys(listed.split(), alters)
    assert set(listed.split()) <= set(KEYS)


def different(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case list():
            return [*value, "x"]
    return {**value, "x": 1}


def test_every_key_is_compared():
    for key, default in KEYS.items():
        section = there = copy.deepcopy(JUDGED)
        *parents, name = key.split(".")
        for parent in parents:
            section = section[parent]
        given, section[name] = section[name], different(section[name])
        [change] = changes(there, JUDGED)
        assert change.key == key and str(change) == f"`{key}` is {change.there!r} there and {change.here!r} here"
        del section[name]  # a run of a program that did not have the key yet
        if key != "reward.functions":
            assert [found.key for found in changes(there, JUDGED)] == ([] if given == default else [key])


def test_what_is_not_compared():
    cfg = asdict(Config())
    assert changes({**cfg, "plan": {"matrix_share": 0.4}}, cfg) == [], "a key of another program"
    assert changes({}, cfg) == [], "everything has its default"


@pytest.mark.parametrize(
    ("entry", "accepted"),
    [("rollout.n", True), ("rollout", True), ("rollout.num_engines", False), ("roll", False), ("model", False)],
)
def test_a_key_is_accepted_by_its_name_or_its_section(entry, accepted):
    assert is_accepted("rollout.n", ["trainer.seed", entry]) == accepted
