"""Rollout correction: weights of every mode and level against loops by hand, bounds, clamp, no gradient."""

import math
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.config.algorithm import CORRECTION_LEVELS, CORRECTION_MODES, RolloutCorrectionConfig
from dapo.objective import rollout_correction

F64 = torch.float64


def by_hand(responses: list[list[float]], cfg: RolloutCorrectionConfig) -> list[tuple[float, float, bool]]:
    """(ratio, weight, affected) per token, from old - rollout of each response."""
    expected = []
    for differences in responses:
        for difference in differences:
            levels = {"token": difference, "sequence": sum(differences), "geometric": fmean(differences)}
            log_ratio = levels[cfg.level]
            ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
            above, below = ratio > cfg.upper, ratio < cfg.lower
            weight, affected = {
                "none": (1.0, False),
                "truncate": (min(ratio, cfg.upper), above),
                "mask": (0.0 if above or below else ratio, above or below),
            }[cfg.mode]
            expected.append((ratio, weight, affected))
    return expected


@pytest.mark.parametrize("level", CORRECTION_LEVELS)
@pytest.mark.parametrize("mode", CORRECTION_MODES)
@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.floats(-30, 30) | st.floats(-1, 1), min_size=1, max_size=4), max_size=4),
    st.randoms(use_true_random=False),
)
def test_equals_loops_by_hand_in_any_order(mode, level, responses, random):
    cfg = RolloutCorrectionConfig(mode=mode, level=level, lower=0.6, upper=1.7)
    expected = by_hand(responses, cfg)
    differences = torch.tensor([d for response in responses for d in response], dtype=F64)
    ids = torch.tensor([i for i, response in enumerate(responses) for _ in response], dtype=torch.int64)
    order = list(range(len(ids)))
    random.shuffle(order)
    result = rollout_correction(differences[order] - 1.0, torch.full_like(differences, -1.0), ids[order], cfg)
    torch.testing.assert_close(result.difference, differences[order], atol=1e-12, rtol=0)
    ratios, weights, affected = zip(*(expected[i] for i in order), strict=True) if order else ((), (), ())
    torch.testing.assert_close(result.ratio, torch.tensor(ratios, dtype=F64), rtol=1e-9, atol=0)
    torch.testing.assert_close(result.weights, torch.tensor(weights, dtype=F64), rtol=1e-9, atol=0)
    assert result.affected.tolist() == list(affected)


@pytest.mark.parametrize(
    ("mode", "level", "weights"),
    [
        pytest.param("none", "token", [1.0, 1.0, 1.0], id="none"),
        pytest.param("truncate", "token", [2.0, 0.25, 1.5], id="tis-token"),
        pytest.param("truncate", "sequence", [1.0, 1.0, 1.5], id="tis-sequence"),
        pytest.param("mask", "token", [0.0, 0.0, 1.5], id="mask-token"),
        pytest.param("mask", "sequence", [1.0, 1.0, 1.5], id="mask-sequence"),
        pytest.param("truncate", "geometric", [1.0, 1.0, 1.5], id="tis-geometric"),
        pytest.param("mask", "geometric", [1.0, 1.0, 1.5], id="mask-geometric"),
    ],
)
def test_by_example(mode, level, weights):
    """Two responses: ratios 4 and 1/4, whose product is 1; and 1.5."""
    rollout = torch.tensor([-2.0, -1.0, -3.0], dtype=F64)
    old = rollout + torch.tensor([4.0, 0.25, 1.5], dtype=F64).log()
    result = rollout_correction(
        old, rollout, torch.tensor([0, 0, 1]), RolloutCorrectionConfig(mode=mode, level=level, lower=0.5, upper=2.0)
    )
    assert result.weights.tolist() == pytest.approx(weights, abs=1e-12)


@pytest.mark.parametrize(("mode", "lower", "upper"), [("truncate", 0.5, 1.0), ("mask", 1.0, 2.0), ("mask", 0.5, 1.0)])
def test_the_bounds_themselves_are_inside(mode, lower, upper):
    same = torch.tensor([-1.0, -2.0])
    result = rollout_correction(
        same, same, torch.tensor([0, 0]), RolloutCorrectionConfig(mode=mode, lower=lower, upper=upper)
    )
    assert result.weights.tolist() == [1.0, 1.0] and not result.affected.any()


@pytest.mark.parametrize("level", CORRECTION_LEVELS)
@pytest.mark.parametrize(("sign", "ratio"), [(1.0, math.exp(20.0)), (-1.0, math.exp(-20.0))])
def test_the_exponent_is_clamped_and_the_difference_is_not(level, sign, ratio):
    differences = torch.tensor([sign * 90.0, sign * 70.0])
    cfg = RolloutCorrectionConfig(mode="truncate", level=level, upper=1e30)
    result = rollout_correction(differences, torch.zeros(2), torch.tensor([0, 0]), cfg)
    assert result.ratio.tolist() == pytest.approx([ratio] * 2, rel=1e-5)
    assert result.weights.isfinite().all()
    assert result.difference.tolist() == differences.tolist()


@pytest.mark.parametrize("mode", CORRECTION_MODES)
@pytest.mark.parametrize("level", CORRECTION_LEVELS)
def test_no_gradient_flows_through(mode, level):
    old, rollout = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    cfg = RolloutCorrectionConfig(mode=mode, level=level)
    result = rollout_correction(old, rollout, torch.tensor([0, 1, 1]), cfg)
    assert not any(t.requires_grad for t in (result.difference, result.ratio, result.weights, result.affected))
