"""Advantages against golden values (computed with verl 0.9.1), hand-worked groups and a brute-force recomputation."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo.advantage import decoupled_advantages, group_advantages, reinforce_plus_plus_advantages, rloo_advantages

NAN = float("nan")
F64 = torch.float64


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        pytest.param([1.0] + [-1.0] * 15, [3.7499925] + [-0.2499995] * 15, id="one-of-16"),
        pytest.param([1.0] * 8 + [-1.0] * 8, [0.9682449] * 8 + [-0.9682449] * 8, id="eight-of-16"),
        pytest.param([1, 1, -1, -1.5], [0.85552709, 0.85552709, -0.66540996, -1.04564422], id="with-overlong-penalty"),
        pytest.param([1.0, NAN, -1.0], [0.7071063, 0.0, -0.7071063], id="unscorable-left-out"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["fp32", "fp64"])
def test_golden_values(rewards, expected, dtype):
    advantages = group_advantages(torch.tensor([rewards], dtype=dtype))
    torch.testing.assert_close(advantages, torch.tensor([expected], dtype=dtype), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "rewards",
    [
        pytest.param([0.1, 0.1, 0.1], id="zero-variance-with-inexact-mean"),
        pytest.param([-1.0, NAN, -1.0], id="zero-variance-among-scored"),
        pytest.param([1.0, NAN, NAN], id="one-scored"),
        pytest.param([NAN, NAN, NAN], id="none-scored"),
        pytest.param([5.0], id="group-of-one"),
    ],
)
@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_groups_without_signal_are_exactly_zero(rewards, normalize_by_std):
    advantages = group_advantages(torch.tensor([rewards], dtype=F64), normalize_by_std=normalize_by_std)
    assert advantages.tolist() == [[0.0] * len(rewards)]


@pytest.mark.parametrize("normalize_by_std", [True, False])
@given(
    st.lists(st.one_of(st.just(NAN), st.integers(-8, 8).map(lambda k: k / 4)), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_equals_brute_force_whatever_the_padding(normalize_by_std, rewards, padding):
    scored = [reward for reward in rewards if reward == reward]
    expected = [0.0] * len(rewards)
    if len(set(scored)) > 1:
        mean, scale = statistics.fmean(scored), statistics.stdev(scored) + 1e-6 if normalize_by_std else 1.0
        expected = [(reward - mean) / scale if reward == reward else 0.0 for reward in rewards]
    padded = torch.tensor([rewards + [NAN] * padding], dtype=F64)
    result = group_advantages(padded, normalize_by_std=normalize_by_std)
    torch.testing.assert_close(result, torch.tensor([expected + [0.0] * padding], dtype=F64), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "rewards", [[1.0, -1.0, -1.0, 0.5], [1.0, NAN, -1.0, 0.2], [0.1, 0.1, 0.1, NAN], [NAN, 1.0, NAN, NAN]]
)
def test_leave_one_out_compares_with_the_mean_of_the_others(rewards):
    scored = [reward for reward in rewards if not math.isnan(reward)]
    expected = []
    for reward in rewards:
        others = (sum(scored) - reward) / (len(scored) - 1) if len(scored) > 1 else reward
        expected.append(0.0 if math.isnan(reward) else reward - others)
    found = rloo_advantages(torch.tensor([rewards], dtype=F64))[0]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    if len(set(scored)) == 1:
        assert not found.any(), "exactly 0"


def test_reinforce_plus_plus_normalizes_over_all_tokens_of_the_batch():
    """Each response counts as often as it has tokens: mean and std of a list with an entry per token."""
    rewards, lengths = [[1.0, -1.0, NAN], [0.5, -1.0, -0.2]], [[3, 5, 4], [1, 2, 7]]
    tokens = [1.0] * 3 + [-1.0] * 5 + [0.5] + [-1.0] * 2 + [-0.2] * 7
    mean, scale = statistics.mean(tokens), statistics.stdev(tokens) + 1e-6
    expected = [[0.0 if math.isnan(reward) else (reward - mean) / scale for reward in row] for row in rewards]
    found = reinforce_plus_plus_advantages(torch.tensor(rewards, dtype=F64), torch.tensor(lengths))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("reward", [0.1, NAN])
def test_reinforce_plus_plus_makes_nothing_of_equal_rewards(reward):
    found = reinforce_plus_plus_advantages(torch.full((2, 3), reward, dtype=F64), torch.full((2, 3), 7))
    assert found.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_decoupled_advantages_normalize_each_part_by_itself(normalize_by_std):
    first, second = [[1.0, 0.0, 1.0, NAN]], [[10.0, 0.0, 0.0, NAN]]
    parts = torch.tensor([list(zip(*pair, strict=True)) for pair in zip(first, second, strict=True)], dtype=F64)
    found = decoupled_advantages(parts, torch.tensor([2.0, 0.5], dtype=F64), normalize_by_std=normalize_by_std)
    alone = [torch.tensor(part, dtype=F64) for part in (first, second)]
    one, other = (group_advantages(part, normalize_by_std=normalize_by_std) for part in alone)
    torch.testing.assert_close(found, 2.0 * one + 0.5 * other)
    assert found[0, 3] == 0.0
