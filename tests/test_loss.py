"""Policy losses against golden values (computed with verl 0.9.1) and loops written from the papers, and token weights
against each mode's formula."""

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo.config.algorithm import LOSS_AGG_MODES
from dapo.loss import cispo_loss, gspo_loss, policy_loss, token_weights

OLD = [[-1.0, -2.0, -0.5], [-1.0, -1.0, -3.0]]
NEW = [[-0.7, -2.5, -0.5], [-0.5, -3.0, 0.0]]
ADVANTAGES = [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
MAX_LENGTH = 10
F64 = torch.float64


def golden(dtype: torch.dtype, c: float) -> tuple[Tensor, dict[str, Tensor]]:
    new, old, advantages = (torch.tensor(rows, dtype=dtype) for rows in (NEW, OLD, ADVANTAGES))
    return policy_loss(new, old, advantages, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=c)


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
def test_golden_loss(mode: str, c: float, expected: float, dtype: torch.dtype) -> None:
    loss, _ = golden(dtype, c)
    weights = token_weights(MASK.sum(dim=1), mode).unsqueeze(1)
    assert loss.dtype == dtype
    assert (weights * loss)[MASK].sum().item() == pytest.approx(expected, abs=1e-6)


def test_golden_fractions_over_the_unmasked_tokens() -> None:
    _, stats = golden(torch.float64, 3.0)
    assert {key: value.dtype for key, value in stats.items()} == {
        "clipped": torch.bool,
        "dual_clipped": torch.bool,
        "approx_kl": torch.float64,
    }
    means = {key: value[MASK].double().mean().item() for key, value in stats.items()}
    assert means == pytest.approx({"clipped": 0.4, "dual_clipped": 0.2, "approx_kl": -0.26}, abs=1e-12)


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
def test_gradient_of_one_token(log_ratio: float, advantage: float, gradient: float) -> None:
    logprobs = torch.tensor([log_ratio - 1.0], dtype=torch.float64, requires_grad=True)
    loss, stats = policy_loss(
        logprobs,
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=10.0,
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient)
    assert not any(value.requires_grad for value in stats.values())


def test_on_policy_nothing_is_clipped() -> None:
    logprobs, advantages = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 0.0, -1.0])
    loss, stats = policy_loss(
        logprobs, logprobs, advantages, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0
    )
    assert torch.equal(loss, -advantages)
    assert {key: value.any().item() for key, value in stats.items()} == {
        "clipped": False,
        "dual_clipped": False,
        "approx_kl": False,
    }


@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_log_ratios_stay_finite(log_ratio: float, advantage: float) -> None:
    logprobs = torch.full((2, 3), log_ratio, requires_grad=True)
    loss, stats = policy_loss(
        logprobs,
        torch.zeros(2, 3),
        torch.full((2, 3), advantage),
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=10.0,
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    assert loss.shape == (2, 3) and loss.isfinite().all() and logprobs.grad.isfinite().all()
    assert stats["approx_kl"].abs().eq(20.0).all()


def test_shapes_that_would_pair_every_token_with_every_other_are_refused() -> None:
    with pytest.raises(ValueError, match="one advantage per token"):
        policy_loss(
            torch.zeros(4),
            torch.zeros(4),
            torch.zeros(4, 1),
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=10.0,
        )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0]), st.lists(st.floats(-1e-3, 1e-3), min_size=1, max_size=4)
        ),
        min_size=1,
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_gspo_is_the_papers_objective_in_any_order(responses: list[tuple[float, list[float]]], random: Random) -> None:
    """J = 1/G sum_i min(s_i A_i, clip(s_i) A_i); dJ/dlogp of a token = A_i s_i / (G |o_i|) where it is not clipped."""
    objective, tokens = 0.0, []
    for i, (advantage, log_ratios) in enumerate(responses):
        ratio = math.exp(sum(log_ratios) / len(log_ratios))
        bounded = min(max(ratio, 1 - 3e-4), 1 + 4e-4)
        objective += min(ratio * advantage, bounded * advantage) / len(responses)
        free = ratio * advantage <= bounded * advantage
        slope = advantage * ratio / (len(responses) * len(log_ratios)) if free else 0.0
        tokens += [(log_ratio, advantage, i, len(log_ratios), slope) for log_ratio in log_ratios]
    random.shuffle(tokens)
    differences, advantages, ids, lengths, slopes = zip(*tokens, strict=True)
    logprobs = (torch.tensor(differences, dtype=F64) - 1.0).requires_grad_()
    loss, stats = gspo_loss(
        logprobs,
        torch.full((len(tokens),), -1.0, dtype=F64),
        torch.tensor(advantages, dtype=F64),
        torch.tensor(ids),
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
    )
    weights = 1.0 / (len(responses) * torch.tensor(lengths, dtype=F64))  # seq-mean-token-mean
    (weights * loss).sum().backward()
    assert logprobs.grad is not None
    assert (weights * loss).sum().item() == pytest.approx(-objective, abs=1e-12)
    torch.testing.assert_close(-logprobs.grad, torch.tensor(slopes, dtype=F64), atol=1e-12, rtol=0)
    assert not any(value.requires_grad for value in stats.values()) and not stats["dual_clipped"].any()


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "clipped"),
    [
        pytest.param([5e-4, 5e-4], 1.0, True, id="above-4e-4"),
        pytest.param([3e-4, 3e-4], 1.0, False, id="below-4e-4"),
        pytest.param([-4e-4, -4e-4], -1.0, True, id="below-minus-3e-4"),
        pytest.param([-2e-4, -2e-4], -1.0, False, id="above-minus-3e-4"),
        pytest.param([-4e-4, -4e-4], 1.0, False, id="a-good-response-may-come-back"),
        pytest.param([5e-4, 5e-4], -1.0, False, id="a-bad-response-may-come-back"),
        pytest.param([0.9, -0.9], 1.0, False, id="only-the-mean-counts"),
        pytest.param([0.0, 1e-3], 1.0, True, id="one-token-clips-its-response"),
    ],
)
def test_gspo_clips_whole_responses(log_ratios: list[float], advantage: float, clipped: bool) -> None:
    logprobs = torch.tensor(log_ratios, requires_grad=True)  # float32, as in training
    ids, zeros = torch.tensor([0, 0]), torch.zeros(2)
    loss, stats = gspo_loss(
        logprobs, zeros, torch.full((2,), advantage), ids, clip_ratio_low=3e-4, clip_ratio_high=4e-4
    )
    loss.sum().backward()
    assert stats["clipped"].tolist() == [clipped] * 2
    assert logprobs.grad is not None and logprobs.grad.eq(0).tolist() == [clipped] * 2


@pytest.mark.parametrize(
    ("log_ratio", "weight", "clipped"),
    [
        pytest.param(0.0, 1.0, False, id="on-policy"),
        pytest.param(0.2, math.exp(0.2), False, id="inside"),
        pytest.param(1.0, 1.28, True, id="above"),
        pytest.param(-1.0, 0.8, True, id="below"),
        pytest.param(300.0, 1.28, True, id="far-above"),
    ],
)
@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_cispo_keeps_the_gradient_of_clipped_tokens(
    log_ratio: float, weight: float, clipped: bool, advantage: float
) -> None:
    logprobs = torch.tensor([-2.0], dtype=F64, requires_grad=True)
    old, advantages = torch.tensor([-2.0 - log_ratio], dtype=F64), torch.tensor([advantage], dtype=F64)
    loss, stats = cispo_loss(logprobs, old, advantages, clip_ratio_low=0.2, clip_ratio_high=0.28)
    loss.sum().backward()
    assert loss.item() == pytest.approx(2.0 * advantage * weight)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(-advantage * weight)
    assert stats["clipped"].item() is clipped and stats["approx_kl"].item() == pytest.approx(-min(log_ratio, 20.0))
    assert not any(value.requires_grad for value in stats.values()) and not stats["dual_clipped"].any()


def test_cispo_gives_no_gradient_to_the_old_policy() -> None:
    logprobs, old = (torch.tensor([value], requires_grad=True) for value in (-2.0, -2.1))
    loss, _ = cispo_loss(logprobs, old, torch.tensor([1.0]), clip_ratio_low=0.2, clip_ratio_high=0.28)
    assert torch.autograd.grad(loss.sum(), [logprobs, old], allow_unused=True)[1] is None


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
def test_weights_by_hand(mode: str, expected: list[float]) -> None:
    weights = token_weights(torch.tensor([2, 0, 1, 3]), mode, group_sizes=[2, 2], max_response_length=MAX_LENGTH)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_all_masked_weighs_nothing(mode: str) -> None:
    weights = token_weights(torch.zeros(4, dtype=torch.int64), mode, group_sizes=[3, 1], max_response_length=MAX_LENGTH)
    assert weights.tolist() == [0.0] * 4


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=5), min_size=1, max_size=6))
def test_weights_sum_to_what_the_formula_says(groups: list[list[int]]) -> None:
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


@settings(deadline=None)
@given(st.permutations(range(6)), st.lists(st.integers(0, MAX_LENGTH), min_size=6, max_size=6))
def test_weights_follow_their_responses_and_ignore_masked_ones(order: list[int], lengths: list[int]) -> None:
    tensor = torch.tensor(lengths)
    padding = torch.zeros(3, dtype=tensor.dtype)
    for mode in set(LOSS_AGG_MODES) - {"group-token-mean"}:
        weights = token_weights(tensor, mode, max_response_length=MAX_LENGTH)
        assert torch.equal(token_weights(tensor[order], mode, max_response_length=MAX_LENGTH), weights[order])
        padded = token_weights(torch.cat([tensor, padding]), mode, max_response_length=MAX_LENGTH)
        assert torch.equal(padded, torch.cat([weights, torch.zeros(3)]))


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        pytest.param("token-maen", ["algorithm.loss_agg_mode", "'token-maen'", *LOSS_AGG_MODES], id="unknown-mode"),
        pytest.param("group-token-mean", ["group_sizes", "2 responses"], id="group-sizes-missing"),
        pytest.param("seq-mean-token-sum-norm", ["data.max_response_length", "None"], id="max-length-missing"),
    ],
)
def test_bad_arguments_are_named(mode: str, named: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        token_weights(torch.tensor([1, 2]), mode)
    assert all(part in str(error.value) for part in named)
