"""What other advantages than Eq. 9's are given: parts with their weights, lengths, a baseline over the batch."""

import dataclasses

import numpy as np
import pytest
import torch

from dapo.advantage import group_advantages
from dapo.batch import advantages_of, has_signal
from dapo.config.algorithm import ADVANTAGES
from dapo.config.reward import RewardFunctionConfig
from dapo.config.schema import Config
from dapo.config.sources import SourceConfig
from dapo.types import Group
from tests.support.fakes import make_group


def with_parts(group: Group, **parts: list[float]) -> Group:
    """The group whose rewards are the sums of these parts."""
    scores = [
        dataclasses.replace(score, reward=sum(values), parts=dict(zip(parts, values, strict=True)))
        for score, *values in zip(group.scores, *parts.values(), strict=True)
    ]
    return dataclasses.replace(group, scores=tuple(scores))


def test_gdpo_weighs_each_part_as_the_reward_does():
    """A function by the weight that the configuration gives it, a penalty by 1; a part that is missing counts for 0."""
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


def test_reinforce_plus_plus_takes_the_lengths_of_the_responses():
    cfg = Config()
    cfg.algorithm.advantage.function = "reinforce_plus_plus"
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [1.0, 0.0, 0.0])]
    tokens = [score.reward for g in groups for score, n in zip(g.scores, g.lengths, strict=True) for _ in range(n)]
    expected = [[(score.reward - np.mean(tokens)) / np.std(tokens, ddof=1) for score in g.scores] for g in groups]
    for row, wanted in zip(advantages_of(groups, cfg), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("function", "expected"), [("rloo", False), ("gdpo", False), ("reinforce_plus_plus", True)])
def test_one_response_that_is_left_has_a_signal_where_the_batch_is_the_baseline(function, expected):
    cfg = Config()
    cfg.reward.overlong_filtering.enable = True
    cfg.algorithm.advantage.function = function
    group = make_group(0, [1.0, 0.0, 0.5])

    def ended(*reasons: str) -> Group:
        pairs = zip(group.responses, reasons, strict=True)
        return dataclasses.replace(
            group, responses=tuple(dataclasses.replace(one, finish_reason=reason) for one, reason in pairs)
        )

    assert has_signal(ended("length", "length", "stop"), cfg) == expected
    assert not has_signal(ended("length", "length", "length"), cfg)
