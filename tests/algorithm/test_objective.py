"""A step's objective and the rollout correction: by hand; and what must not change them: order, padding, masked NaN."""

import dataclasses
import math
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo.algorithm.objective import (
    Constants,
    Objective,
    objective,
    off_policy_mask,
    rollout_correction,
    score_centering,
)
from dapo.config.algorithm import (
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    AlgorithmConfig,
    KLConfig,
    RolloutCorrectionConfig,
)
from dapo.loss import kl_penalty, token_weights

F64 = torch.float64
STATS = ("trained", "left_out", "log_ratio", "clipped_low", "clipped_high", "dual_clipped", "kl", "entropy")


def config(policy_loss: str = "clip", *, kl: float = 0.3, entropy: float = 0.2, estimator: str = "k3"):
    low, high = (3e-4, 4e-4) if policy_loss == "gspo" else (0.2, 0.28)
    return AlgorithmConfig(
        policy_loss=policy_loss,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=3.0,
        kl=KLConfig(estimator=estimator, loss_coeff=kl),
        entropy_coeff=entropy,
    )


def tokens(seed: int, lengths: list[int], mode: str = "token-mean") -> tuple[Tensor, Tensor, Constants]:
    """Random tokens of responses of these lengths, far enough off-policy that every clip acts."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    old, difference, reference, entropy, correction = torch.randn(5, size, dtype=F64, generator=generator)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    weights = token_weights(torch.tensor(lengths), mode, group_sizes=[len(lengths)], max_response_length=10).double()
    advantages = torch.randn(len(lengths), dtype=F64, generator=generator)
    constants = Constants(
        old_logprobs=old - 2.0,
        ref_logprobs=old - 2.0 + reference,
        correction=correction.exp(),
        advantages=advantages[ids],
        weights=weights[ids],
        segment_ids=ids,
        chosen=(torch.arange(size) % 3 == 1).double(),
    )
    return old - 2.0 + 0.7 * difference, entropy.abs(), constants


def run(logprobs: Tensor, entropy: Tensor, constants: Constants, cfg: AlgorithmConfig):
    """(loss, gradients of logprobs and entropy, the whole result)."""
    logprobs, entropy = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
    result = objective(logprobs, entropy, constants, cfg)
    result.loss.backward()
    zero = torch.zeros_like(entropy)
    return result.loss.detach(), logprobs.grad, zero if entropy.grad is None else entropy.grad, result


def taken(constants: Constants, index: Tensor) -> Constants:
    values = {f.name: getattr(constants, f.name) for f in dataclasses.fields(Constants)}
    return Constants(**{name: None if value is None else value[index] for name, value in values.items()})


def assert_same(left: Objective, right: Objective, index: Tensor | slice = slice(None)) -> None:
    """Stats of `left` are those of `right` at `index`."""
    for name in STATS:
        torch.testing.assert_close(getattr(left, name), getattr(right, name)[index], atol=1e-12, rtol=0, msg=name)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_decoupled_ppo_by_hand(mode, estimator):
    """sum w (c max(-A r, -A clip r), dual clip, + kl - entropy): the correction is on the policy loss alone."""
    logprobs, entropy, constants = tokens(1, [3, 5, 2, 7], mode)
    loss, gradient, entropy_gradient, result = run(logprobs, entropy, constants, config(estimator=estimator))
    expected, slopes, cases = 0.0, [], set()
    for lp, h, old, ref, c, a, w in zip(
        logprobs.tolist(),
        entropy.tolist(),
        *(getattr(constants, f.name).tolist() for f in dataclasses.fields(Constants)[:5]),
        strict=True,
    ):
        ratio, d = math.exp(lp - old), ref - lp
        clipped = min(max(ratio, 0.8), 1.28)
        surrogate, case = max((-a * ratio, "free"), (-a * clipped, "free" if clipped == ratio else "clipped"))
        if a < 0 and surrogate > -a * 3.0:
            surrogate, case = -a * 3.0, "dual"
        cases.add(case)
        kl = {"k1": -d, "k2": d * d / 2, "k3": min(10.0, math.exp(d) - d - 1)}[estimator]
        expected += w * (c * surrogate + 0.3 * kl - 0.2 * h)
        slopes.append(w * (c * (-a * ratio if case == "free" else 0.0) - 0.3 * d))
    assert cases == {"free", "clipped", "dual"}
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=F64), atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy_gradient, -0.2 * constants.weights)
    torch.testing.assert_close(result.kl, kl_penalty(logprobs, constants.ref_logprobs, estimator))


def uncorrected(old: list, advantages: list, weights: list, ids: list) -> Constants:
    old, advantages, weights = (torch.tensor(values, dtype=F64) for values in (old, advantages, weights))
    return Constants(old, None, torch.ones_like(old), advantages, weights, torch.tensor(ids))


def test_golden_values_with_a_masked_token():
    """The golden case of tests/test_loss.py, its sixth token masked: 2 of 5 clipped, 1 in 5 by the dual clip."""
    old, ids = [-1, -2, math.nan, -1, -1, -3], [0, 0, 0, 1, 1, 1]
    constants = uncorrected(old, [1, 1, 1, -1, -1, -1], [0.2, 0.2, 0, 0.2, 0.2, 0.2], ids)
    logprobs = torch.tensor([-0.7, -2.5, -0.5, -0.5, -3.0, 0.0], dtype=F64)
    loss, _, _, result = run(logprobs, torch.ones(6, dtype=F64), constants, config(kl=0.0, entropy=0.0))
    assert loss.item() == pytest.approx(0.712438, abs=1e-6)
    assert result.trained.tolist() == [1, 1, 0, 1, 1, 1]
    assert result.clipped_high.tolist() == [1, 0, 0, 0, 0, 0] and result.clipped_low.tolist() == [0, 0, 0, 0, 1, 0]
    assert result.dual_clipped.tolist() == [0, 0, 0, 0, 0, 1]
    assert result.log_ratio.sum().item() / 5 == pytest.approx(0.26)
    assert not any(getattr(result, name).requires_grad for name in STATS)
    assert not result.kl.any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_names_the_bound_by_the_ratio(advantage):
    constants = uncorrected([-2.0] * 3, [advantage] * 3, [1.0] * 3, [0] * 3)
    result = run(torch.tensor([-1.0, -2.0, -3.0], dtype=F64), torch.ones(3), constants, config("cispo", kl=0.0))[3]
    assert (result.clipped_high.tolist(), result.clipped_low.tolist()) == ([1, 0, 0], [0, 0, 1])


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
@settings(max_examples=settings.default.max_examples // 3)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_tokens_changes_nothing(policy_loss, seed, lengths, random):
    logprobs, entropy, constants = tokens(seed, lengths)
    order = list(range(sum(lengths)))
    random.shuffle(order)
    index = torch.tensor(order)
    straight = run(logprobs, entropy, constants, config(policy_loss))
    shuffled = run(logprobs[index], entropy[index], taken(constants, index), config(policy_loss))
    torch.testing.assert_close(shuffled[0], straight[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(shuffled[1], straight[1][index], atol=1e-12, rtol=0)
    assert_same(shuffled[3], straight[3], index)


@pytest.mark.parametrize("held", [3.0, math.nan, -math.inf])
@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
@pytest.mark.parametrize("segment", ["own", "of-a-trained-response"])
@settings(max_examples=settings.default.max_examples // 5)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_masked_tokens_change_nothing_whatever_they_hold(policy_loss, held, segment, seed, lengths, data):
    """Padding, anywhere: tokens of weight 0, in all tensors at once."""
    logprobs, entropy, constants = tokens(seed, lengths)
    size, added = len(logprobs), data.draw(st.integers(1, 4))
    index = torch.tensor(data.draw(st.permutations(range(size + added))))  # [size, size + added) are the padding

    def pad(values: Tensor, value: float) -> Tensor:
        return torch.cat([values, values.new_full((added,), value)])[index]

    filled = {
        f.name: pad(getattr(constants, f.name), held)
        for f in dataclasses.fields(Constants)
        if f.name not in ("weights", "segment_ids", "support_logprobs")
    }
    ids = pad(constants.segment_ids, len(lengths) if segment == "own" else 0)
    padded = Constants(weights=pad(constants.weights, 0.0), segment_ids=ids, **filled)
    straight = run(logprobs, entropy, constants, config(policy_loss))
    masked, inside = index >= size, torch.argsort(index)[:size]
    result = run(pad(logprobs, held), pad(entropy, held), padded, config(policy_loss))
    torch.testing.assert_close(result[0], straight[0], atol=1e-12, rtol=0)
    for gradient, expected in zip(result[1:3], straight[1:3], strict=True):
        torch.testing.assert_close(gradient[inside], expected, atol=1e-12, rtol=0)
        assert (gradient[masked] == 0).all()
    assert_same(straight[3], result[3], inside)
    assert not any(getattr(result[3], name)[masked].any() for name in STATS)


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
@pytest.mark.parametrize("lengths", [pytest.param([], id="no-token"), pytest.param([2, 3], id="all-masked")])
def test_a_rank_without_a_token_to_train_on(policy_loss, lengths):
    logprobs, entropy, constants = tokens(3, lengths or [1])
    index = slice(0 if not lengths else None)
    constants = taken(dataclasses.replace(constants, weights=torch.zeros_like(constants.weights)), index)
    loss, gradient, _, result = run(logprobs[index], entropy[index], constants, config(policy_loss))
    assert loss.item() == 0.0 and (gradient == 0).all()
    assert len(result.trained) == sum(lengths) and not result.trained.any()


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
                "icepop": (ratio, False) if 0.5 <= ratio <= 5.0 else (0.0, True),
            }[cfg.mode]
            expected.append((ratio, weight, affected))
    return expected


@pytest.mark.parametrize("level", CORRECTION_LEVELS)
@pytest.mark.parametrize("mode", CORRECTION_MODES)
@settings(max_examples=settings.default.max_examples // 2)
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


@pytest.mark.parametrize(("mode", "lower", "upper"), [("truncate", 0.5, 1.0), ("mask", 1.0, 2.0), ("mask", 0.5, 1.0)])
def test_the_bounds_themselves_are_inside(mode, lower, upper):
    same = torch.tensor([-1.0, -2.0])
    result = rollout_correction(
        same, same, torch.tensor([0, 0]), RolloutCorrectionConfig(mode=mode, lower=lower, upper=upper)
    )
    assert result.weights.tolist() == [1.0, 1.0] and not result.affected.any()


@given(
    st.lists(
        st.tuples(st.sampled_from([-2.0, 0.0, 1.0]), st.lists(st.floats(-1, 1), min_size=1, max_size=4)), max_size=5
    ),
    st.randoms(use_true_random=False),
)
def test_bad_responses_that_the_policy_has_left_are_masked_whole(responses, random):
    rows = []
    for i, (advantage, gaps) in enumerate(responses):
        mean = sum(gaps) / len(gaps)
        if abs(mean - 0.1) < 1e-9:
            return
        rows += [(gap, advantage, i, 0.0 if advantage < 0 and mean > 0.1 else 1.0) for gap in gaps]
    random.shuffle(rows)
    gap, advantages, ids, kept = torch.tensor(rows, dtype=F64).reshape(-1, 4).unbind(1)
    logprobs = torch.full_like(gap, -3.0, requires_grad=True)
    mask = off_policy_mask(logprobs, gap - 3.0, advantages, ids.long(), 0.1)
    assert torch.equal(mask, kept) and not mask.requires_grad


def test_a_factor_of_zero_leaves_a_token_out_of_the_policy_loss_alone():
    logprobs, entropy, constants = tokens(5, [3, 4])
    factor = constants.correction * (torch.arange(7) % 2)
    loss, gradient, entropy_gradient, result = run(
        logprobs, entropy, dataclasses.replace(constants, correction=factor), config("reinforce")
    )
    even = torch.arange(7) % 2 == 0
    assert result.left_out.tolist() == even.tolist()
    pull = 0.3 * constants.weights * (logprobs - constants.ref_logprobs)
    torch.testing.assert_close(gradient[even], pull[even])
    torch.testing.assert_close(entropy_gradient, -0.2 * constants.weights)


@pytest.mark.parametrize("mode", CORRECTION_MODES)
@pytest.mark.parametrize("level", CORRECTION_LEVELS)
def test_no_gradient_flows_through(mode, level):
    old, rollout = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    cfg = RolloutCorrectionConfig(mode=mode, level=level)
    result = rollout_correction(old, rollout, torch.tensor([0, 1, 1]), cfg)
    assert not any(t.requires_grad for t in (result.difference, result.ratio, result.weights, result.affected))


CENTERED = [
    RolloutCorrectionConfig(),
    RolloutCorrectionConfig(mode="truncate", upper=1.05),
    RolloutCorrectionConfig(mode="mask", lower=0.7, upper=1.5),
]


def expected_gradient(logits: Tensor, engine: Tensor, head: Tensor | None, cfg: RolloutCorrectionConfig) -> Tensor:
    """The gradient by the logits [V] of one token's objective, on average over the tokens that the engine samples with
    probabilities [V]: each is one row, and its probability the row's weight. head: tokens that the engine returns."""
    size = len(logits)
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    correction = rollout_correction(logprobs.detach(), engine.log(), torch.arange(size), cfg)
    constants = Constants(
        old_logprobs=logprobs.detach(),
        ref_logprobs=None,
        correction=correction.weights,
        advantages=torch.full((size,), -1.7, dtype=F64),
        weights=engine,
        segment_ids=torch.arange(size),
        support_logprobs=None if head is None else engine[head].log().expand(size, -1),
    )
    given = None if head is None else logprobs[head].expand(size, -1)
    objective(
        logprobs, torch.zeros(size), constants, AlgorithmConfig(rollout_correction=cfg), None, given
    ).loss.backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("correction", CENTERED, ids=lambda cfg: cfg.mode)
def test_score_centering_cancels_what_an_advantage_does_on_average(correction: RolloutCorrectionConfig) -> None:
    """By enumeration of a small vocabulary (arXiv 2609.20807): with every token returned, whatever the engine samples;
    with its most likely ones, where it samples the others in proportion to the policy."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        logits, other = 1.5 * torch.randn(2, 9, dtype=F64, generator=generator)
        engine = (logits + 0.5 * other).softmax(-1)
        drift = expected_gradient(logits, engine, None, correction)
        assert drift.abs().max() > 1e-4
        everything = torch.randperm(9, generator=generator)
        assert expected_gradient(logits, engine, everything, correction).abs().max() < 1e-12
        head = engine.topk(4).indices
        tail = torch.ones(9, dtype=torch.bool).index_fill(0, head, False)
        scaled = engine.clone()
        scaled[tail] = logits.softmax(-1)[tail]
        scaled[tail] *= (1 - engine[head].sum()) / scaled[tail].sum()
        assert expected_gradient(logits, scaled, head, correction).abs().max() < 1e-12
        # Where the tail is another, the head alone removes most of the drift, not all.
        left = expected_gradient(logits, engine, head, RolloutCorrectionConfig())
        assert 0 < left.norm() < expected_gradient(logits, engine, None, RolloutCorrectionConfig()).norm()


@pytest.mark.parametrize("correction", CENTERED, ids=lambda cfg: cfg.mode)
def test_the_gradient_of_the_centering_term_is_the_mean_score_written_out(correction: RolloutCorrectionConfig) -> None:
    """Token by token over the whole vocabulary; rows have different numbers of tokens."""
    generator = torch.Generator().manual_seed(6)
    rows, size = 5, 8
    logits = torch.randn(rows, size, dtype=F64, generator=generator).requires_grad_()
    engine = (logits.detach() + 0.6 * torch.randn(rows, size, dtype=F64, generator=generator)).softmax(-1)
    heads = [engine[row].topk(row + 1).indices for row in range(rows)]
    ids = torch.nn.utils.rnn.pad_sequence(heads, batch_first=True)
    present = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in heads], batch_first=True).bool()
    own = logits.log_softmax(-1).gather(1, ids).masked_fill(~present, 0.0)
    given = engine.log().gather(1, ids).masked_fill(~present, -math.inf)
    score_centering(own, given, correction).sum().backward()
    found, logits.grad = logits.grad, None
    total = torch.zeros((), dtype=F64)
    for row, head in enumerate(heads):
        p = logits[row].log_softmax(-1)
        inside = set(head.tolist())
        outside = [v for v in range(size) if v not in inside]
        rho = (1 - sum(float(engine[row, v]) for v in inside)) / sum(float(p[v].exp()) for v in outside)
        for v in range(size):
            q = float(engine[row, v]) if v in inside else rho * float(p[v].exp())
            ratio = float(p[v].exp()) / q
            weight = {
                "none": 1.0,
                "truncate": min(ratio, correction.upper),
                "mask": ratio if correction.lower <= ratio <= correction.upper else 0.0,
            }[correction.mode]
            total = total + q * weight * p[v]
    total.backward()
    torch.testing.assert_close(found, logits.grad, atol=1e-12, rtol=0)
