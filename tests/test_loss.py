"""Policy losses against golden values (computed with verl 0.9.1) and loops written from the papers, and token weights
against each mode's formula."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dapo.config.algorithm import LOSS_AGG_MODES
from dapo.loss import (
    cispo_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    kl_cov_loss,
    policy_loss,
    reinforce_loss,
    sapo_loss,
    token_weights,
)

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


def token(log_ratio: float, advantage: float, function, *more: Tensor, logprob: float = -2.0, **parameters):
    """(loss, gradient, statistics) of one token."""
    logprobs = torch.tensor([logprob], dtype=F64, requires_grad=True)
    old, advantages = torch.tensor([logprob - log_ratio], dtype=F64), torch.tensor([advantage], dtype=F64)
    loss, stats = function(logprobs, old, advantages, *more, **parameters)
    loss.sum().backward()
    assert logprobs.grad is not None and not any(value.requires_grad for value in stats.values())
    return loss.item(), logprobs.grad.item(), {name: value.item() for name, value in stats.items()}


@given(st.floats(-3, 3), SOME_ADVANTAGES)
def test_sapo_weighs_the_gradient_by_a_bell_around_ratio_one(log_ratio, advantage):
    """Loss -A f(r), f = 4 / tau / (1 + e^(-tau (r - 1))); its gradient is -A r / cosh(tau (r - 1) / 2)^2."""
    loss, gradient, stats = token(log_ratio, advantage, sapo_loss, tau_positive=0.9, tau_negative=1.3)
    tau, ratio = (0.9 if advantage > 0 else 1.3), math.exp(log_ratio)
    assert loss == pytest.approx(-advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))), abs=1e-12)
    assert gradient == pytest.approx(-advantage * ratio / math.cosh(tau * (ratio - 1) / 2) ** 2, abs=1e-12)
    assert stats == pytest.approx({"clipped": False, "dual_clipped": False, "approx_kl": -log_ratio})


@given(
    st.lists(st.tuples(SOME_ADVANTAGES, st.lists(st.floats(-1, 1), min_size=1, max_size=4)), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_gmpo_is_the_papers_objective_in_any_order(responses, random):
    """J = 1/G sum_i A_i (product of min(r, e^high) where A > 0, max(r, e^-low) where A < 0)^(1/|o_i|)."""
    rows, objective, place = [], 0.0, iter(range(1000))
    leaves = [torch.tensor(log_ratios, dtype=F64, requires_grad=True) for _, log_ratios in responses]
    for (advantage, log_ratios), leaf in zip(responses, leaves, strict=True):
        ratios = leaf.exp()
        bounded = torch.minimum(ratios, torch.tensor(0.5, dtype=F64).exp())
        if advantage < 0:
            bounded = torch.maximum(ratios, torch.tensor(-0.3, dtype=F64).exp())
        objective = objective + advantage * bounded.prod() ** (1 / len(log_ratios)) / len(responses)
        outside = [x > 0.5 if advantage > 0 else x < -0.3 and advantage < 0 for x in log_ratios]
        number = next(place)
        rows += [(x, advantage, number, len(log_ratios), out) for x, out in zip(log_ratios, outside, strict=True)]
    objective.backward()
    order = list(range(len(rows)))
    random.shuffle(order)
    log_ratio, advantages, ids, lengths, clipped = zip(*(rows[i] for i in order), strict=True)
    logprobs = (torch.tensor(log_ratio, dtype=F64) - 1.0).requires_grad_()
    old = torch.full_like(logprobs, -1.0)
    loss, stats = gmpo_loss(logprobs, old, torch.tensor(advantages, dtype=F64), torch.tensor(ids), low=0.3, high=0.5)
    weights = 1.0 / (len(responses) * torch.tensor(lengths, dtype=F64))  # seq-mean-token-mean
    (weights * loss).sum().backward()
    assert logprobs.grad is not None
    assert (weights * loss).sum().item() == pytest.approx(-objective.item(), abs=1e-12)
    wanted = torch.cat([leaf.grad for leaf in leaves])[order]
    inside = (logprobs.detach() - old + 0.3).abs().minimum((logprobs.detach() - old - 0.5).abs()) > 1e-9
    torch.testing.assert_close(-logprobs.grad[inside], wanted[inside], atol=1e-12, rtol=0)
    assert (stats["clipped"] == torch.tensor(clipped))[inside].all() and not stats["dual_clipped"].any()


def binary_divergence(kind: str, p: float, q: float) -> float:
    """Of (q, 1 - q) to (p, 1 - p)."""
    if kind == "tv":
        return (abs(p - q) + abs((1 - p) - (1 - q))) / 2
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


@given(st.floats(1e-4, 0.999), st.floats(1e-4, 0.999), SOME_ADVANTAGES, st.sampled_from(["tv", "kl"]))
def test_dppo_drops_what_has_left_the_engines_policy_in_the_direction_of_its_advantage(p, q, advantage, kind):
    bound = 0.15 if kind == "tv" else 0.05
    divergence = binary_divergence(kind, p, q)
    if abs(divergence - bound) < 1e-9:
        return
    away = (p > q and advantage > 0) or (p < q and advantage < 0)
    dropped = away and divergence > bound
    weight = 0.0 if dropped else min(p / q, 5.0)
    loss, gradient, stats = token(
        math.log(p / q),
        advantage,
        dppo_loss,
        logprob=math.log(p),
        divergence=kind,
        bound=bound,
        max_ratio=5.0,
    )
    assert (loss, gradient) == pytest.approx((-advantage * weight * math.log(p), -advantage * weight), abs=1e-9)
    assert (stats["clipped"], stats["dual_clipped"]) == (dropped, not dropped and p / q > 5.0)


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize(
    ("old", "new", "advantage", "kept"),
    [
        pytest.param(0.0, 0.0, 1.0, True, id="both-are-certain"),
        pytest.param(-1e-3, 1e-7, -1.0, True, id="rounding-above-certainty"),
        pytest.param(-0.7, 0.0, 1.0, False, id="certain-from-even"),
        pytest.param(0.0, -0.7, -1.0, False, id="even-from-certain"),
        pytest.param(0.0, -0.7, 1.0, True, id="even-from-certain-may-come-back"),
        pytest.param(-400.0, -500.0, -1.0, True, id="both-are-impossible"),
    ],
)
def test_dppo_at_the_ends_of_probability(kind, old, new, advantage, kept):
    logprobs = torch.tensor([new], requires_grad=True)
    bound = 0.15 if kind == "tv" else 0.05
    arguments = (torch.tensor([old]), torch.tensor([advantage]))
    loss, stats = dppo_loss(logprobs, *arguments, divergence=kind, bound=bound, max_ratio=20.0)
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all() and loss.isfinite().all()
    assert stats["clipped"].item() is not kept and (logprobs.grad != 0).item() is kept


@given(st.floats(-3, 3), SOME_ADVANTAGES, st.sampled_from([0.0, 0.7]))
def test_kl_cov_pulls_chosen_tokens_back(log_ratio, advantage, penalty):
    loss, gradient, stats = token(log_ratio, advantage, kl_cov_loss, torch.tensor([penalty], dtype=F64))
    ratio, away = math.exp(log_ratio), -2.0 - (-2.0 - log_ratio)  # as float64 has it
    assert loss == pytest.approx(-advantage * ratio + penalty * abs(log_ratio), abs=1e-12)
    pull = penalty * ((away > 0) - (away < 0))
    assert gradient == pytest.approx(-advantage * ratio + pull, abs=1e-12)
    assert not stats["clipped"] and not stats["dual_clipped"]


@given(st.floats(-30, 30), SOME_ADVANTAGES)
def test_reinforce_has_no_ratio(log_ratio, advantage):
    loss, gradient, stats = token(log_ratio, advantage, reinforce_loss)
    assert (loss, gradient) == (2.0 * advantage, -advantage)
    assert stats["approx_kl"] == pytest.approx(max(-20.0, min(20.0, -log_ratio))) and not stats["clipped"]


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
