"""Policy losses against golden values (computed with verl 0.9.1) and loops written from the papers, and token weights
against each mode's formula."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dapo.config.algorithm import LOSS_AGG_MODES
from dapo.loss import cispo_loss, gspo_loss, policy_loss, token_weights

OLD = [[-1.0, -2.0, -0.5], [-1.0, -1.0, -3.0]]
NEW = [[-0.7, -2.5, -0.5], [-0.5, -3.0, 0.0]]
ADVANTAGES = [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
MAX_LENGTH = 10
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0}
SOME_ADVANTAGES = st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0])
LOG_RATIOS = st.lists(st.floats(-1e-3, 1e-3), min_size=1, max_size=4)
NARROW = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}  # of GSPO
F64 = torch.float64


def golden(dtype: torch.dtype, c: float) -> tuple[Tensor, dict[str, Tensor]]:
    new, old, advantages = (torch.tensor(rows, dtype=dtype) for rows in (NEW, OLD, ADVANTAGES))
    return policy_loss(new, old, advantages, **CLIP | {"clip_ratio_c": c})


@pytest.mark.parametrize(
    ("mode", "c", "expected"),
    [
        pytest.param("token-mean", 3.0, 0.712438, id="token-mean-c3"),
        pytest.param("token-mean", 10.0, 2.112438, id="token-mean-c10"),
        pytest.param("seq-mean-token-sum", 3.0, 1.781095, id="seq-mean-token-sum-c3"),
        pytest.param("seq-mean-token-mean", 3.0, 0.436488, id="seq-mean-token-mean-c3"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_golden_loss(mode, c, expected, dtype):
    loss, _ = golden(dtype, c)
    weights = token_weights(MASK.sum(dim=1), mode).unsqueeze(1)
    assert loss.dtype == dtype
    assert (weights * loss)[MASK].sum().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient"),
    [
        pytest.param(0.0, 2.0, -2.0, id="on-policy-is-minus-advantage"),
        pytest.param(0.24, 1.0, -(2.718281828459045**0.24), id="inside-the-raised-upper-bound"),
        pytest.param(0.3, 1.0, 0.0, id="above-the-upper-bound"),
        pytest.param(-0.5, 1.0, -(2.718281828459045**-0.5), id="a-good-token-may-always-come-back"),
        pytest.param(-0.3, -1.0, 0.0, id="below-the-lower-bound"),
        pytest.param(0.5, -1.0, 2.718281828459045**0.5, id="a-bad-token-may-always-come-back"),
        pytest.param(3.0, -1.0, 0.0, id="dual-clip-stops-the-gradient"),
        pytest.param(0.1, 0.0, 0.0, id="zero-advantage"),
    ],
)
def test_gradient_of_one_token(log_ratio, advantage, gradient):
    logprobs = torch.tensor([log_ratio - 1.0], dtype=F64, requires_grad=True)
    loss, stats = policy_loss(logprobs, -torch.ones(1, dtype=F64), torch.tensor([advantage], dtype=F64), **CLIP)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient)
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_log_ratios_stay_finite(log_ratio, advantage):
    logprobs = torch.full((2, 3), log_ratio, requires_grad=True)
    loss, stats = policy_loss(logprobs, torch.zeros(2, 3), torch.full((2, 3), advantage), **CLIP)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert loss.shape == (2, 3) and loss.isfinite().all() and logprobs.grad.isfinite().all()
    assert stats["approx_kl"].abs().eq(20.0).all()


def test_shapes_that_would_pair_every_token_with_every_other_are_refused():
    with pytest.raises(ValueError, match="one advantage per token"):
        policy_loss(torch.zeros(4), torch.zeros(4), torch.zeros(4, 1), **CLIP)


@given(st.lists(st.tuples(SOME_ADVANTAGES, LOG_RATIOS), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_gspo_is_the_papers_objective_in_any_order(responses, random):
    """J = 1/G sum_i min(s_i A_i, clip(s_i) A_i); dJ/dlogp of a token = A_i s_i / (G |o_i|) where it is not clipped."""
    objective, tokens = 0.0, []
    for i, (advantage, log_ratios) in enumerate(responses):
        ratio = math.exp(sum(log_ratios) / len(log_ratios))
        bounded = min(max(ratio, 1 - 3e-4), 1 + 4e-4)
        objective += min(ratio * advantage, bounded * advantage) / len(responses)
        free = ratio * advantage <= bounded * advantage
        slope = advantage * ratio / (len(responses) * len(log_ratios)) if free else 0.0
        tokens += [(log_ratio, advantage, i, len(log_ratios), slope, not free) for log_ratio in log_ratios]
    random.shuffle(tokens)
    differences, advantages, ids, lengths, slopes, clipped = zip(*tokens, strict=True)
    logprobs = (torch.tensor(differences, dtype=F64) - 1.0).requires_grad_()
    old = torch.full((len(tokens),), -1.0, dtype=F64)
    loss, stats = gspo_loss(logprobs, old, torch.tensor(advantages, dtype=F64), torch.tensor(ids), **NARROW)
    weights = 1.0 / (len(responses) * torch.tensor(lengths, dtype=F64))  # seq-mean-token-mean
    (weights * loss).sum().backward()
    assert logprobs.grad is not None
    assert (weights * loss).sum().item() == pytest.approx(-objective, abs=1e-12)
    torch.testing.assert_close(-logprobs.grad, torch.tensor(slopes, dtype=F64), atol=1e-12, rtol=0)
    assert stats["clipped"].tolist() == list(clipped) and not stats["dual_clipped"].any()
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize(
    ("log_ratio", "weight", "clipped"),
    [
        pytest.param(0.0, 1.0, False, id="on-policy"),
        pytest.param(0.2, math.exp(0.2), False, id="inside"),
        pytest.param(1.0, 1.28, True, id="above"),
        pytest.param(-1.0, 0.8, True, id="below"),
    ],
)
@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_cispo_keeps_the_gradient_of_clipped_tokens(log_ratio, weight, clipped, advantage):
    logprobs = torch.tensor([-2.0], dtype=F64, requires_grad=True)
    old, advantages = torch.tensor([-2.0 - log_ratio], dtype=F64), torch.tensor([advantage], dtype=F64)
    loss, stats = cispo_loss(logprobs, old, advantages, clip_ratio_low=0.2, clip_ratio_high=0.28)
    loss.sum().backward()
    assert loss.item() == pytest.approx(2.0 * advantage * weight)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(-advantage * weight)
    assert stats["clipped"].item() is clipped and stats["approx_kl"].item() == pytest.approx(-min(log_ratio, 20.0))
    assert not any(value.requires_grad for value in stats.values()) and not stats["dual_clipped"].any()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        pytest.param("token-mean", [1 / 6, 0, 1 / 6, 1 / 6], id="token-mean"),
        pytest.param("group-token-mean", [1 / 4, 0, 1 / 8, 1 / 8], id="group-token-mean"),
        pytest.param("seq-mean-token-mean", [1 / 6, 0, 1 / 3, 1 / 9], id="seq-mean-token-mean"),
        pytest.param("seq-mean-token-sum", [1 / 3, 0, 1 / 3, 1 / 3], id="seq-mean-token-sum"),
        pytest.param("seq-mean-token-sum-norm", [1 / 30, 0, 1 / 30, 1 / 30], id="seq-mean-token-sum-norm"),
    ],
)
def test_weights_by_hand(mode, expected):
    weights = token_weights(torch.tensor([2, 0, 1, 3]), mode, group_sizes=[2, 2], max_response_length=MAX_LENGTH)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(expected)


@given(st.lists(st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=5), min_size=1, max_size=6))
def test_weights_sum_to_what_the_formula_says(groups):
    lengths = torch.tensor([length for group in groups for length in group])
    valid = int((lengths > 0).sum())
    tokens = int(lengths.sum())
    sums = {
        "token-mean": 1.0,
        "group-token-mean": 1.0,
        "seq-mean-token-mean": 1.0,
        "seq-mean-token-sum": tokens / max(valid, 1),
        "seq-mean-token-sum-norm": tokens / max(valid, 1) / MAX_LENGTH,
    }
    for mode, expected in sums.items():
        weights = token_weights(
            lengths, mode, group_sizes=[len(group) for group in groups], max_response_length=MAX_LENGTH
        )
        assert (weights * lengths).sum().item() == pytest.approx(expected if valid else 0.0, rel=1e-5)
        assert ((weights > 0) == (lengths > 0)).all()


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        pytest.param("token-maen", ["algorithm.loss_agg_mode", "'token-maen'", *LOSS_AGG_MODES], id="unknown-mode"),
        pytest.param("group-token-mean", ["group_sizes", "2 responses"], id="group-sizes-missing"),
        pytest.param("seq-mean-token-sum-norm", ["data.max_response_length", "None"], id="max-length-missing"),
    ],
)
def test_bad_arguments_are_named(mode, named):
    with pytest.raises(ValueError) as error:
        token_weights(torch.tensor([1, 2]), mode)
    assert all(part in str(error.value) for part in named)
