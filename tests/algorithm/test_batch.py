"""Groups into mini-batches: advantages per group, weights per optimizer step, overlong filtering, order, staleness."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dapo.advantage import group_advantages
from dapo.algorithm.batch import advantages_of, build_batch, deal, has_signal
from dapo.config.algorithm import ADVANTAGES, LOSS_AGG_MODES
from dapo.config.reward import RewardFunctionConfig
from dapo.config.sampling import SourceConfig
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


@pytest.mark.parametrize(("mini_batch", "count"), [(4, 1), (1, 4)])
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


def test_all_responses_to_a_prompt_have_the_experts_that_the_first_had_in_it():
    group = GROUPS[0]
    length = len(group.draw.prompt.token_ids)
    responses = [
        replace(r, experts=np.full((length + len(r.token_ids) - 1, 2, 1), number, np.uint8))
        for number, r in enumerate(group.responses)
    ]
    responses[0] = group.responses[0]  # of an engine that returned none
    (minibatch,) = build_batch([replace(group, responses=tuple(responses))], make_config(1), version=0).minibatches
    for number, sequence in enumerate(minibatch):
        assert sequence.prompt_experts.shape == (length - 1, 2, 1) and (sequence.prompt_experts == 1).all()
        if number:
            assert sequence.experts.shape == (len(sequence.token_ids) - length, 2, 1)
            assert (sequence.experts == number).all()
    assert minibatch[0].experts is None


def test_without_the_division_the_advantage_is_the_deviation_from_the_mean():
    cfg = make_config(1)
    cfg.algorithm.advantage.normalize_by_std = False
    (minibatch,) = build_batch([make_group(0, [1.0, 1.0, 0.0, 0.0])], cfg, version=0).minibatches
    assert [s.advantage for s in minibatch] == pytest.approx([1.0, 1.0, -1.0, -1.0])


def truncated(group: Group, *samples: int) -> Group:
    """The group with these responses cut at the cap."""
    responses = [replace(r, finish_reason="length" if i in samples else "stop") for i, r in enumerate(group.responses)]
    return replace(group, responses=tuple(responses))


def without(group: Group, *samples: int) -> Group:
    kept = [(r, s) for i, (r, s) in enumerate(zip(group.responses, group.scores, strict=True)) if i not in samples]
    responses, scores = zip(*kept, strict=True)
    return replace(group, responses=responses, scores=scores)


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
        pytest.param([1.0, 0.0], [0, 1], True, False, id="all truncated"),
        pytest.param([1.0, 0.0], [1], True, True, id="one is left, with its advantage over the other"),
        pytest.param([1.0, 0.0], [1], False, False, id="one is left, alone in its baseline"),
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
    cfg, nan = Config(), float("nan")
    cfg.algorithm.advantage.whiten = True
    mixed = make_group(1, [1.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    for rewards, *others in (([1.0, 1.0], mixed), ([1.0, 1.0],), ([nan, nan],)):
        assert advantages_of([make_group(0, rewards, rewards), *others], cfg)[0] == [0.0, 0.0]


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


@pytest.mark.parametrize(("kept", "expected"), [(False, [4, 4, 4, 1]), (True, [4] * 4)])
def test_staleness_counts_updates_since_each_token_or_with_kept_keys_the_first_was_sampled(kept, expected):
    spans = (VersionSpan(version=2, start=0, end=3), VersionSpan(version=5, start=3, end=4))
    group = make_group(0, [1.0, 0.0])
    first = replace(group.responses[0], policy_versions=spans)
    group = replace(group, responses=(first, make_response(5, version=6)))
    cfg = make_config(1)
    cfg.weight_sync.keep_kv_cache = kept
    (minibatch,) = build_batch([group], cfg, version=6).minibatches
    assert [s.staleness.tolist() for s in minibatch] == [expected, [0] * 5]


@pytest.mark.parametrize("reward", [math.inf, -math.inf, 1e300, math.nan])
@pytest.mark.parametrize("whiten", [False, True])
def test_a_reward_that_is_not_finite_makes_its_response_unscorable_and_no_other(reward, whiten):
    cfg = make_config(8)
    cfg.algorithm.advantage.whiten = whiten

    group, other = make_group(0, [1.0, 0.0, 1.0, 0.0]), make_group(1, [1.0, 0.0])
    broken = replace(group, scores=(*group.scores[:3], replace(group.scores[3], reward=reward)))
    advantages = advantages_of([broken, other], cfg)
    expected = advantages_of([without(group, 3), other], cfg)
    assert advantages == [[*expected[0], 0.0], expected[1]]
    assert all(advantage != 0.0 for advantage in expected[0])


def with_parts(group: Group, **parts: list[float]) -> Group:
    """The group whose rewards are the sums of these parts."""
    scores = [
        replace(score, reward=sum(values), parts=dict(zip(parts, values, strict=True)))
        for score, *values in zip(group.scores, *parts.values(), strict=True)
    ]
    return replace(group, scores=tuple(scores))


def test_gdpo_weighs_each_part_as_the_reward_does():
    """A function by the weight that the configuration gives it, a penalty by its coefficient; a part that is missing
    counts for 0."""
    groups = [
        with_parts(make_group(0, [1.0, 0.0, 0.0]), math=[1.0, -1.0, -1.0], overlong=[0.0, -0.5, 0.0]),
        with_parts(make_group(1, [1.0, 0.0]), math=[1.0, -1.0]),
    ]
    cfg = Config()
    cfg.reward.functions[0].weight = 3.0
    cfg.algorithm.advantage.function = "gdpo"

    def alone(values: list[float]) -> np.ndarray:
        return group_advantages(torch.tensor([values], dtype=torch.float64))[0].numpy()

    first, second = advantages_of(groups, cfg)
    assert first == pytest.approx(3.0 * alone([1.0, -1.0, -1.0]) + alone([0.0, -0.5, 0.0]))
    assert second == pytest.approx(3.0 * alone([1.0, -1.0]))
    cfg.algorithm.advantage.whiten = True
    white = np.concatenate(advantages_of(groups, cfg))
    assert (white.mean(), white.std()) == pytest.approx((0.0, 1.0), abs=1e-5)


@pytest.mark.parametrize("coefficient", [1e-3, 0.1, 2.0])
@pytest.mark.parametrize("penalty", ["kl_penalty", "overlong"])
def test_gdpo_weighs_a_penalty_by_its_coefficient(penalty, coefficient):
    raw = [-0.9, -1.0, -1.2, 0.0]
    cfg = Config()
    cfg.algorithm.advantage.function = "gdpo"
    cfg.algorithm.kl.reward_coeff = cfg.reward.overlong_buffer.penalty_factor = coefficient
    parts = {"math": [1.0, 1.0, -1.0, -1.0], penalty: [coefficient * value for value in raw]}
    (found,) = advantages_of([with_parts(make_group(0, [1.0, 1.0, 0.0, 0.0]), **parts)], cfg)
    math_alone, raw_alone = group_advantages(torch.tensor([parts["math"], raw], dtype=torch.float64)).numpy()
    assert found == pytest.approx(math_alone + coefficient * raw_alone)


def test_gdpo_weighs_the_functions_of_an_entry_by_their_own_weights():
    """Also a weight of 0, of what is only recorded, and one below it, of what is unwanted."""
    own = [RewardFunctionConfig(path="math"), RewardFunctionConfig(path="format", weight=-2.0)]
    own.append(RewardFunctionConfig(path="gsm8k", weight=0.0))
    parts = {"school:math": [1.0, 0.0], "school:format": [0.0, 1.0], "school:gsm8k": [0.0, 1.0]}
    cfg = Config()
    cfg.data.sources = [SourceConfig(name="school", files=["x"], functions=own)]
    cfg.algorithm.advantage.function = "gdpo"
    (found,) = advantages_of([with_parts(make_group(0, [1.0, 0.0]), **parts)], cfg)
    alone = group_advantages(torch.tensor([[1.0, 0.0]], dtype=torch.float64))[0].numpy()
    assert found == pytest.approx(3.0 * alone)


@pytest.mark.parametrize("function", ADVANTAGES)
def test_an_unscorable_response_has_no_advantage_whatever_the_function(function):
    nan = float("nan")
    cfg = Config()
    cfg.algorithm.advantage.function = function
    first, second = advantages_of([make_group(0, [1.0, 0.0, nan]), make_group(1, [1.0, 0.0])], cfg)
    assert first[2] == 0.0 and first[0] > 0 > first[1] and second[0] > 0 > second[1]


@pytest.mark.parametrize(("function", "expected"), [("rloo", False), ("gdpo", False), ("reinforce_plus_plus", True)])
def test_one_response_that_is_left_has_a_signal_where_the_batch_is_the_baseline(function, expected):
    cfg = Config()
    cfg.reward.overlong_filtering.enable = True
    cfg.algorithm.advantage.function = function
    group = make_group(0, [1.0, 0.0, 0.5])
    assert has_signal(truncated(group, 0, 1), cfg) == expected
    assert not has_signal(truncated(group, 0, 1, 2), cfg)


def test_reinforce_plus_plus_takes_the_lengths_of_the_responses():
    cfg = Config()
    cfg.algorithm.advantage.function = "reinforce_plus_plus"
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [1.0, 0.0, 0.0])]
    tokens = [score.reward for g in groups for score, n in zip(g.scores, g.lengths, strict=True) for _ in range(n)]
    expected = [[(score.reward - np.mean(tokens)) / np.std(tokens, ddof=1) for score in g.scores] for g in groups]
    for row, wanted in zip(advantages_of(groups, cfg), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("groups", "sizes"), [(64, [32, 32]), (65, [22, 22, 21]), (33, [17, 16]), (32, [32]), (5, [5]), (96, [32, 32, 32])]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_no_optimizer_step_is_on_a_remainder(groups, sizes, shuffle):
    cfg = Config()
    cfg.actor.ppo_mini_batch_size, cfg.actor.shuffle = 32, shuffle
    minibatches, order = deal(groups, cfg, version=3)
    assert [len(each) for each in minibatches] == sizes and sorted(order) == list(range(len(sizes)))
    assert sorted(index for each in minibatches for index in each) == list(range(groups))


def test_responses_that_came_without_what_the_actors_need_are_refused():
    for key, value in ("rollout.top_k", 20), ("algorithm.score_centering", 20):
        section, name = key.split(".")
        cfg = make_config(1)
        setattr(getattr(cfg, section), name, value)
        with pytest.raises(ValueError, match=f"`{key}` \\(20\\).*responses of step 4 came without"):
            build_batch(GROUPS[:1], cfg, version=3)
