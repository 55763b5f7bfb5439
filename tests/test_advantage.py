"""Advantages against golden values (computed with verl 0.9.1), hand-worked groups and a brute-force recomputation."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.advantage import group_advantages

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
def test_golden_values(rewards: list[float], expected: list[float], dtype: torch.dtype) -> None:
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
def test_groups_without_signal_are_exactly_zero(rewards: list[float], normalize_by_std: bool) -> None:
    advantages = group_advantages(torch.tensor([rewards], dtype=F64), normalize_by_std=normalize_by_std)
    assert advantages.tolist() == [[0.0] * len(rewards)]


def test_mean_only_is_the_distance_from_the_mean() -> None:
    rewards = torch.tensor([[1.0, -1.0, -1.0, NAN], [0.3, 0.3, 0.3, 0.3]], dtype=F64)
    expected = torch.tensor([[4 / 3, -2 / 3, -2 / 3, 0.0], [0.0] * 4], dtype=F64)
    torch.testing.assert_close(group_advantages(rewards, normalize_by_std=False), expected)


def test_groups_do_not_touch_each_other() -> None:
    first, second = torch.tensor([[1.0, -1.0, 0.5]]), torch.tensor([[NAN, 7.0, -3.0]])
    both = group_advantages(torch.cat([first, second]))
    assert torch.equal(both, torch.cat([group_advantages(first), group_advantages(second)]))


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.just(NAN), st.integers(-8, 8).map(lambda k: k / 4)), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_equals_brute_force_whatever_the_padding(rewards: list[float], padding: int) -> None:
    scored = [reward for reward in rewards if reward == reward]
    expected = [0.0] * len(rewards)
    if len(set(scored)) > 1:
        mean, std = statistics.fmean(scored), statistics.stdev(scored)
        expected = [(reward - mean) / (std + 1e-6) if reward == reward else 0.0 for reward in rewards]
    result = group_advantages(torch.tensor([rewards + [NAN] * padding], dtype=F64))
    torch.testing.assert_close(result, torch.tensor([expected + [0.0] * padding], dtype=F64), atol=1e-9, rtol=0)
