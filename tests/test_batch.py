"""Groups into mini-batches: advantages per group, weights per optimizer step, overlong filtering, order, staleness."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from dapo.advantage import group_advantages
from dapo.batch import advantages_of, build_batch, has_signal
from dapo.config.algorithm import LOSS_AGG_MODES
from dapo.config.schema import Config
from dapo.types import Group, TrainBatch, VersionSpan
from tests.support.fakes import make_group, make_response


def make_config(mini_batch: int, **algorithm) -> Config:
    cfg = Config()
    cfg.actor.ppo_mini_batch_size = mini_batch
    for key, value in algorithm.items():
        setattr(cfg.algorithm, key, value)
    return cfg


GROUPS = [make_group(index, [1.0, 0.0, 0.0, 0.0]) for index in range(4)]


@pytest.mark.parametrize(("mini_batch", "count"), [pytest.param(4, 1, id="one"), pytest.param(1, 4, id="four")])
def test_every_minibatch_weighs_one_in_sum_over_tokens(mini_batch, count):
    batch = build_batch(GROUPS, make_config(mini_batch), version=3)
    assert batch.version == 3 and len(batch.minibatches) == count
    for minibatch in batch.minibatches:
        assert len(minibatch) == 4 * mini_batch
        assert sum(s.token_weight * len(s.rollout_logprobs) for s in minibatch) == pytest.approx(1.0)


def test_sequences_hold_prompt_then_response_and_the_advantage_of_their_group():
    (minibatch,) = build_batch(GROUPS[:1], make_config(1), version=0).minibatches
    assert [s.advantage for s in minibatch] == pytest.approx([1.499999, -0.4999995, -0.4999995, -0.4999995], abs=1e-5)
    for sequence, response in zip(minibatch, GROUPS[0].responses, strict=True):
        prompt = GROUPS[0].draw.prompt.token_ids
        np.testing.assert_array_equal(sequence.token_ids, np.concatenate([prompt, response.token_ids]))
        assert sequence.num_prompt_tokens == len(prompt)


def test_without_the_division_the_advantage_is_the_deviation_from_the_mean():
    cfg = make_config(1)
    cfg.algorithm.advantage.normalize_by_std = False
    (minibatch,) = build_batch(GROUPS[:1], cfg, version=0).minibatches
    assert [s.advantage for s in minibatch] == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_an_unscorable_response_has_no_advantage():
    nan = float("nan")
    group = make_group(0, [1.0, 0.0, nan], [1.0, -1.0, nan])
    (minibatch,) = build_batch([group], make_config(1), version=0).minibatches
    assert minibatch[2].advantage == 0.0
    assert minibatch[0].advantage == pytest.approx(-minibatch[1].advantage)


def truncated(group: Group, *samples: int) -> Group:
    """The group with these responses cut at the cap."""
    responses = [
        dataclasses.replace(response, finish_reason="length" if sample in samples else "stop")
        for sample, response in enumerate(group.responses)
    ]
    return dataclasses.replace(group, responses=tuple(responses))


def without(group: Group, *samples: int) -> Group:
    kept = [sample for sample in range(len(group.responses)) if sample not in samples]
    return dataclasses.replace(
        group,
        responses=tuple(group.responses[sample] for sample in kept),
        scores=tuple(group.scores[sample] for sample in kept),
    )


def filtering(mode: str = "token-mean", *, in_baseline: bool = True) -> Config:
    cfg = make_config(8, loss_agg_mode=mode)
    cfg.reward.overlong_filtering.enable = True
    cfg.reward.overlong_filtering.in_baseline = in_baseline
    return cfg


def draws(batch: TrainBatch) -> list[list[int]]:
    """Draw of each group, by mini-batch; `make_prompt` writes it into the prompt's last token."""
    return [list(dict.fromkeys(int(s.token_ids[2]) - 3 for s in minibatch)) for minibatch in batch.minibatches]


RAGGED = [make_group(0, [1.0, 0.0]), make_group(1, [1.0, 0.0, 0.0, 1.0, 0.0]), make_group(2, [0.0, 0.0, 1.0])]
CUT = {0: (1,), 1: (0, 2, 4), 2: ()}  # samples truncated, by group


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_filtered_responses_leave_numerator_and_denominator(mode):
    """The others weigh what they would if the truncated ones had never been."""
    groups = [truncated(group, *CUT[i]) for i, group in enumerate(RAGGED)]
    (minibatch,) = build_batch(groups, filtering(mode), version=0).minibatches
    kept = [without(group, *CUT[i]) for i, group in enumerate(RAGGED)]
    (expected,) = build_batch(kept, make_config(8, loss_agg_mode=mode), version=0).minibatches
    assert [s.token_ids.tolist() for s in minibatch] == [s.token_ids.tolist() for s in expected]
    assert [s.token_weight for s in minibatch] == [s.token_weight for s in expected]
    (whole,) = build_batch(groups, make_config(8, loss_agg_mode=mode), version=0).minibatches
    assert len(whole) == 10 and len(minibatch) == 6  # without filtering they stay


@pytest.mark.parametrize("in_baseline", [True, False])
def test_filtered_responses_stay_in_the_baseline_unless_told_otherwise(in_baseline):
    groups = [truncated(group, *CUT[i]) for i, group in enumerate(RAGGED)]
    (minibatch,) = build_batch(groups, filtering(in_baseline=in_baseline), version=0).minibatches
    expected = []
    for i, group in enumerate(RAGGED):
        rewards = torch.tensor([[score.reward for score in group.scores]], dtype=torch.float64)
        if not in_baseline:
            rewards[0, list(CUT[i])] = torch.nan
        (row,) = group_advantages(rewards).tolist()
        expected += [value for sample, value in enumerate(row) if sample not in CUT[i]]
    assert [s.advantage for s in minibatch] == pytest.approx(expected)
    assert (minibatch[0].advantage == 0.0) is not in_baseline  # one of two is left: nothing to compare it with


@pytest.mark.parametrize(
    ("accuracies", "cut", "in_baseline", "expected"),
    [
        pytest.param([1.0, 0.0], [], True, True, id="none truncated"),
        pytest.param([1.0, 0.0], [0, 1], True, False, id="all truncated"),
        pytest.param([1.0, 0.0], [1], True, True, id="one is left, with its advantage over the other"),
        pytest.param([1.0, 0.0], [1], False, False, id="one is left, alone in its baseline"),
        pytest.param([1.0, 1.0, 0.0], [2], True, True, id="equal ones are left, above the baseline"),
        pytest.param([1.0, 1.0, 0.0], [2], False, False, id="equal ones are left"),
        pytest.param([1.0, 0.0, 0.0], [2], False, True, id="different ones are left"),
        pytest.param([1.0, 0.0, 0.5], [0, 1], True, False, id="the one that is left is the mean"),
    ],
)
def test_a_group_has_a_signal_when_a_response_in_the_loss_has_an_advantage(accuracies, cut, in_baseline, expected):
    group, cfg = truncated(make_group(0, accuracies), *cut), filtering(in_baseline=in_baseline)
    assert has_signal(group, cfg) == expected
    sequences = build_batch([group], cfg, version=0).minibatches[0]
    assert any(sequence.advantage for sequence in sequences) == expected
    cfg.reward.overlong_filtering.enable = False
    assert has_signal(group, cfg)


def test_in_baseline_means_nothing_without_filtering():
    cfg = filtering(in_baseline=False)
    cfg.reward.overlong_filtering.enable = False
    groups = [truncated(group, 0) for group in GROUPS]
    same, plain = (build_batch(groups, c, version=0).minibatches for c in (cfg, make_config(8)))
    assert [s.advantage for s in same[0]] == [s.advantage for s in plain[0]]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_minibatch_of_filtered_responses_is_empty(mode):
    cfg = filtering(mode)
    cfg.actor.ppo_mini_batch_size, cfg.actor.shuffle = 1, False
    batch = build_batch([truncated(GROUPS[0], 0, 1, 2, 3), GROUPS[1]], cfg, version=0)
    assert [len(minibatch) for minibatch in batch.minibatches] == [0, 4]
    assert batch.order == (0, 1)


def test_ragged_groups_have_the_advantages_that_each_has_alone():
    together = advantages_of(RAGGED, Config())
    assert [len(row) for row in together] == [2, 5, 3]
    for group, row in zip(RAGGED, together, strict=True):
        (alone,) = advantages_of([group], Config())
        assert row == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_whitening_is_over_the_responses_that_have_an_advantage(normalize_by_std):
    nan = float("nan")
    groups = [make_group(0, [1.0, 0.0, nan], [3.0, -1.0, nan]), make_group(1, [1.0, 0.0], [0.5, 0.2]), *RAGGED]
    cfg = Config()
    cfg.algorithm.advantage.normalize_by_std = normalize_by_std
    plain = np.concatenate(advantages_of(groups, cfg))
    cfg.algorithm.advantage.whiten = True
    white = np.concatenate(advantages_of(groups, cfg))
    assert white[2] == 0.0
    scored = np.delete(white, 2)
    assert (scored.mean(), scored.std()) == pytest.approx((0.0, 1.0), abs=1e-5)
    np.testing.assert_allclose(scored, np.delete(plain, 2) / np.delete(plain, 2).std(), atol=1e-5)


def test_whitening_leaves_groups_without_variance_at_exactly_zero():
    groups = [make_group(0, [1.0, 1.0, 1.0]), make_group(1, [1.0, 0.0, 0.0], [1.0, 0.0, 0.0])]
    cfg = Config()
    cfg.algorithm.advantage.whiten = True
    assert advantages_of(groups, cfg)[0] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rewards", [pytest.param([1.0, 1.0], id="equal"), pytest.param([float("nan")] * 2, id="none")])
def test_whitening_makes_nothing_of_nothing(rewards):
    cfg = Config()
    cfg.algorithm.advantage.whiten = True
    assert advantages_of([make_group(0, rewards, rewards)], cfg) == [[0.0, 0.0]]


MANY = [make_group(index, [1.0, 0.0]) for index in range(12)]


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_group_is_in_one_minibatch_and_every_epoch_takes_each_once(epochs, shuffle):
    cfg = make_config(3)
    cfg.actor.ppo_epochs, cfg.actor.shuffle = epochs, shuffle
    batch = build_batch(MANY, cfg, version=5)
    dealt = draws(batch)
    assert [len(minibatch) for minibatch in dealt] == [3] * 4
    assert sorted(sum(dealt, [])) == list(range(12))
    taken = [list(batch.order[start : start + 4]) for start in range(0, 4 * epochs, 4)]
    assert len(batch.order) == 4 * epochs and all(sorted(epoch) == [0, 1, 2, 3] for epoch in taken)
    in_draw_order = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert (dealt == in_draw_order) is not shuffle
    if not shuffle:
        assert taken == [[0, 1, 2, 3]] * epochs


def test_shuffling_depends_on_seed_and_version_alone():
    cfg = make_config(3)
    cfg.actor.ppo_epochs = 4

    def dealt(seed: int, version: int) -> tuple[list[list[int]], tuple[int, ...]]:
        cfg.trainer.seed = seed
        batch = build_batch(MANY, cfg, version=version)
        return draws(batch), batch.order

    assert dealt(0, 7) == dealt(0, 7)
    different = [dealt(seed, version) for seed in (0, 1) for version in (0, 1, 7)]
    assert all(left != right for i, left in enumerate(different) for right in different[:i])
    order = dealt(0, 0)[1]
    assert len({order[start : start + 4] for start in range(0, 16, 4)}) > 1


def test_one_minibatch_keeps_the_order_of_the_draws():
    cfg = make_config(12)
    cfg.actor.ppo_epochs = 2
    batch = build_batch(MANY, cfg, version=3)
    assert draws(batch) == [list(range(12))] and batch.order == (0, 0)


def test_staleness_counts_updates_since_each_token_was_sampled():
    spans = (VersionSpan(version=2, start=0, end=3), VersionSpan(version=5, start=3, end=4))
    group = make_group(0, [1.0, 0.0])
    first = dataclasses.replace(group.responses[0], policy_versions=spans)
    group = dataclasses.replace(group, responses=(first, make_response(5, version=6)))
    (minibatch,) = build_batch([group], make_config(1), version=6).minibatches
    assert [s.staleness.tolist() for s in minibatch] == [[4, 4, 4, 1], [0] * 5]


@pytest.mark.parametrize("reward", [math.inf, -math.inf, 1e300, math.nan])
@pytest.mark.parametrize("whiten", [False, True])
def test_a_reward_that_is_not_finite_makes_its_response_unscorable_and_no_other(reward, whiten):
    cfg = make_config(8)
    cfg.algorithm.advantage.whiten = whiten

    def with_last(value):
        group = make_group(0, [1.0, 0.0, 1.0, 0.0])
        return dataclasses.replace(
            group, scores=(*group.scores[:3], dataclasses.replace(group.scores[3], reward=value))
        )

    advantages = advantages_of([with_last(reward), make_group(1, [1.0, 0.0])], cfg)
    three = dataclasses.replace(with_last(0.0), scores=with_last(0.0).scores[:3])
    expected = advantages_of(
        [dataclasses.replace(three, responses=three.responses[:3]), make_group(1, [1.0, 0.0])], cfg
    )
    assert advantages == [[*expected[0], 0.0], expected[1]]
    assert all(advantage != 0.0 for advantage in expected[0])
