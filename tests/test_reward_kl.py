"""KL to the reference policy: the estimates against their definitions, and the penalty in the reward."""

import asyncio
import math

import numpy as np
import pytest
import torch

from dapo.advantage import group_advantages
from dapo.algorithm.batch import penalize_kl, reference_batch
from dapo.config.algorithm import KL_ESTIMATORS, KLConfig
from dapo.config.schema import Config
from dapo.loss import kl_penalty
from dapo.report.log import read_metrics
from tests.support.driver.loops import make_trainer, tiny_config
from tests.support.fakes import FakeActors, make_group

F64 = torch.float64
PER_TOKEN = {"k1": 0.5, "k2": 0.125, "k3": 0.10653066}  # for a reference that is half a nat less sure


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        pytest.param("k1", [0.0, -0.5, 0.5, -3.0, -20.0, 20.0], id="k1"),
        pytest.param("k2", [0.0, 0.125, 0.125, 4.5, 200.0, 200.0], id="k2"),
        pytest.param("k3", [0.0, 0.14872127, 0.10653066, 10.0, 10.0, 10.0], id="k3"),
    ],
)
def test_golden_kl_and_the_gradient_of_k2(estimator, expected):
    difference = torch.tensor([0.0, 0.5, -0.5, 3.0, 400.0, -400.0], dtype=F64)
    logprobs = torch.full((6,), -2.0, dtype=F64, requires_grad=True)
    kl = kl_penalty(logprobs, logprobs.detach() + difference, estimator)
    kl.sum().backward()
    assert kl.tolist() == pytest.approx(expected, abs=5e-9)
    assert logprobs.grad.tolist() == [0.0, -0.5, 0.5, -3.0, 0.0, 0.0]  # of (ref - logp)^2 / 2 within +-20


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_mean_gradient_of_the_kl_estimate_is_that_of_the_kl(estimator):
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=F64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.2, 0.9, -1.0], dtype=F64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    mean = (logprobs.detach().exp() * kl_penalty(logprobs, reference, estimator)).sum()
    torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], exact, atol=1e-12, rtol=0)


def penalty_config(estimator: str = "k1", coeff: float = 0.1) -> Config:
    cfg = Config()
    cfg.algorithm.kl.estimator, cfg.algorithm.kl.reward_coeff = estimator, coeff
    return cfg


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_rewards_lose_the_sum_over_their_tokens(estimator):
    groups = [make_group(0, [1.0, math.nan, 0.0], [1.0, math.nan, -1.0]), make_group(1, [0.0, 1.0])]
    logprobs = [s.rollout_logprobs - np.float32(0.5) for s in reference_batch(groups, version=0)]
    penalized = penalize_kl(groups, logprobs, penalty_config(estimator))
    for before, after in zip(groups, penalized, strict=True):
        assert (after.draw, after.responses) == (before.draw, before.responses)
        for response, old, new in zip(before.responses, before.scores, after.scores, strict=True):
            penalty = -0.1 * PER_TOKEN[estimator] * len(response.token_ids)
            assert new.reward == pytest.approx(old.reward + penalty, abs=1e-7, nan_ok=True)
            assert new.parts == pytest.approx(old.parts | {"kl_penalty": penalty}, abs=1e-7, nan_ok=True)
            assert new.accuracy == pytest.approx(old.accuracy, abs=0, nan_ok=True)
            assert math.isnan(new.reward) == math.isnan(old.reward)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
@pytest.mark.parametrize("whose", ["reference", "engine"])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_penalty_of_numbers_that_are_not_finite_makes_its_response_unscorable(broken, whose, estimator):
    """-inf would be clamped: a response that is impossible under a policy would pass for one that is a little off."""
    (group,) = groups = [make_group(0, [1.0, 0.0, 0.0])]
    logprobs = [s.rollout_logprobs.copy() for s in reference_batch(groups, version=0)]
    if whose == "reference":
        logprobs[1][2] = broken
    else:
        group.responses[1].rollout_logprobs[2] = broken
    (penalized,) = penalize_kl(groups, logprobs, penalty_config(estimator))
    rewards = [score.reward for score in penalized.scores]
    assert rewards[0] == 1.0 and math.isnan(rewards[1]) and rewards[2] == -1.0
    assert [score.failure for score in penalized.scores] == ["", "kl", ""]
    assert "kl_penalty" not in penalized.scores[1].parts and penalized.accuracies == group.accuracies


class CountingActors(FakeActors):
    """Also records what the reference was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[list[int]]] = []

    async def reference_logprobs(self, sequences):
        self.asked.append([s.token_ids.tolist() for s in sequences])
        return await super().reference_logprobs(sequences)


def train(tmp_path, coeff: float, loss_coeff: float = 0.0) -> tuple[CountingActors, list[dict]]:
    """Three steps of four groups of four; odd samples are right, but never those of every third prompt."""
    cfg = tiny_config(total_steps=3)
    cfg.algorithm.kl = KLConfig(estimator="k1", reward_coeff=coeff, loss_coeff=loss_coeff)
    cfg.actor.shuffle = cfg.eval.before_train = cfg.eval.after_train = False
    cfg.eval.every = cfg.checkpoint.every = 0
    trainer, actors = make_trainer(tmp_path, cfg, actors=CountingActors())
    asyncio.run(trainer.run())
    return actors, read_metrics(tmp_path / "metrics.jsonl")


def test_the_trainer_trains_on_the_shifted_rewards(tmp_path):
    """Same draws and accuracies as without the penalty; advantages of +-1 less 0.1 x 0.5 per token."""
    plain, plain_lines = train(tmp_path / "plain", 0.0, loss_coeff=0.1)  # in the loss it is the actors' business
    actors, lines = train(tmp_path / "penalized", 0.1)
    assert plain.asked == []
    assert len(actors.asked) == len(actors.batches) == 3
    for asked, batch, other, line in zip(actors.asked, actors.batches, plain.batches, lines, strict=True):
        sequences = [s for minibatch in batch.minibatches for s in minibatch]
        assert asked == [s.token_ids.tolist() for s in sequences]
        assert asked == [s.token_ids.tolist() for minibatch in other.minibatches for s in minibatch]
        lengths = torch.tensor([len(s.rollout_logprobs) for s in sequences], dtype=F64).view(4, 4)
        rewards = torch.tensor([[-1.0, 1.0, -1.0, 1.0]], dtype=F64) - 0.1 * 0.5 * lengths
        expected = group_advantages(rewards).flatten().tolist()
        assert [s.advantage for s in sequences] == pytest.approx(expected, abs=1e-6)
        assert line["reward/kl_penalty"] == pytest.approx(-0.05 * float(lengths.mean()), abs=1e-6)
        assert line["batch/reward_mean"] == pytest.approx(float(rewards.mean()), abs=1e-6)
        assert line["perf/reference_s"] >= 0.0
    for line, other in zip(lines, plain_lines, strict=True):
        assert "reward/kl_penalty" not in other and "perf/reference_s" not in other
        for key in ("rollout/accuracy", "rollout/reward_mean", "buffer/drawn"):
            assert line[key] == other[key]
