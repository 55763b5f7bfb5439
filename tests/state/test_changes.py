"""Every key of the configuration either alters what a run means or does not, and what differs is found."""

import copy
from dataclasses import asdict
from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.config.fields import ITEM, keys
from dapo.config.schema import Config
from dapo.state.changes import HARMLESS, MEANING, alters_meaning, changes, check_accepted, covers, is_accepted

TINY = asdict(compose([], "dapo_tiny"))
JUDGED = asdict(
    compose(["reward.functions=[{path: judge}]", "reward.judge={url: 'http://h/v1', model: m}"], "dapo_tiny")
)
KEYS = [one.name for one in keys(Config) if ITEM not in one.name]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_a_class(key: str) -> None:
    """A new key without one fails here: add it to MEANING or HARMLESS."""
    assert any(covers(entry, key) for entry in (*MEANING, *HARMLESS))


def test_the_two_classes_are_disjoint() -> None:
    assert not set(MEANING) & set(HARMLESS) and len(set(HARMLESS)) == len(HARMLESS)


@pytest.mark.parametrize(
    "key",
    "model.path model.dtype model.lora.rank model.lora.target_modules data.train_files data.train_batch_size "
    "data.max_prompt_length data.max_response_length data.shuffle rollout.n rollout.temperature rollout.top_p "
    "rollout.top_k filter_groups.enable filter_groups.min_scored filter_groups.admission filter_groups.max_staleness "
    "reward.functions reward.model.path reward.model.weight reward.overlong_buffer.len "
    "reward.overlong_filtering.enable algorithm.policy_loss algorithm.clip_ratio_high algorithm.kl.loss_coeff "
    "algorithm.advantage.normalize_by_std algorithm.rollout_correction.mode actor.ppo_mini_batch_size "
    "actor.ppo_epochs trainer.seed".split(),
)
def test_what_alters_the_meaning(key: str) -> None:
    assert key in KEYS and alters_meaning(key)


@pytest.mark.parametrize(
    "key",
    "actor.optim.lr actor.optim.lr_scheduler trainer.total_steps trainer.output_dir logging.samples "
    "checkpoint.every checkpoint.resume eval.n eval.every data.val_files rollout.num_engines rollout.vllm "
    "rollout.timeout_s reward.num_workers reward.timeout_s reward.limits.wall_s actor.num_workers "
    "actor.max_tokens_per_gpu actor.offload actor.timeout_s weight_sync.transport weight_sync.max_mean_logprob_diff "
    "algorithm.rollout_correction.max_mean_stale_logprob_diff filter_groups.max_num_gen_batches "
    "filter_groups.on_budget".split(),
)
def test_what_does_not(key: str) -> None:
    assert key in KEYS and not alters_meaning(key)


def test_a_key_without_a_class_counts_as_one_that_alters_the_meaning() -> None:
    assert alters_meaning("something.new") and not alters_meaning("eval.something_new")
    assert not covers("rollout.n", "rollout.num_engines")


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


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_compared(key: str) -> None:
    here, there = copy.deepcopy(JUDGED), copy.deepcopy(JUDGED)
    section = there
    *parents, name = key.split(".")
    for parent in parents:
        section = section[parent]
    section[name] = different(section[name])
    [change] = changes(there, here)
    assert change.key == key and str(change) == f"`{key}` is {change.there!r} there and {change.here!r} here"
    del section[name]  # a run of a program that did not have the key yet
    default = next(one.default for one in keys(Config) if one.name == key)
    given = here
    for part in key.split("."):
        given = given[part]
    if key != "reward.functions":
        assert [found.key for found in changes(there, here)] == ([] if given == default else [key])


def test_a_judges_keys_are_compared_where_one_is_asked() -> None:
    here, there = copy.deepcopy(TINY), copy.deepcopy(TINY)
    there["reward"]["judge"]["pattern"] = "of an older program"
    assert changes(there, here) == []
    here["data"]["sources"] = [{"name": "a", "functions": [{"path": "math"}, {"path": "judge"}]}]
    assert [found.key for found in changes(there, here)] == ["data.sources", "reward.judge.pattern"]


def test_keys_of_another_program_are_not_compared() -> None:
    cfg = asdict(Config())
    assert changes({**cfg, "plan": {"hfu": 0.4}}, cfg) == []
    assert changes({}, cfg) == [], "everything has its default"


@pytest.mark.parametrize(
    ("entry", "accepted"),
    [("rollout.n", True), ("rollout", True), ("rollout.num_engines", False), ("roll", False), ("model", False)],
)
def test_a_key_is_accepted_by_its_name_or_its_section(entry: str, accepted: bool) -> None:
    assert is_accepted("rollout.n", ["trainer.seed", entry]) == accepted


def test_what_is_accepted_must_exist() -> None:
    check_accepted(["rollout", "rollout.n", "data.train_files"])
    with pytest.raises(ValueError, match=r"`checkpoint.accept_changes` names `rollout.m`, which is no key; did you"):
        check_accepted(["rollout.m"])
