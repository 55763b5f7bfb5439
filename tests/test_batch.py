"""Groups into mini-batches: advantages per group, weights per optimizer step, order kept."""

import numpy as np
import pytest

from dapo.batch import build_batch
from dapo.config import Config
from dapo.evaluate import summarize
from tests.fakes import make_group


def make_config(mini_batch: int, **algorithm) -> Config:
    cfg = Config()
    cfg.actor.ppo_mini_batch_size = mini_batch
    for key, value in algorithm.items():
        setattr(cfg.algorithm, key, value)
    return cfg


GROUPS = [make_group(index, [1.0, 0.0, 0.0, 0.0]) for index in range(4)]


@pytest.mark.parametrize(("mini_batch", "count"), [pytest.param(4, 1, id="one"), pytest.param(1, 4, id="four")])
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


def test_without_the_division_the_advantage_is_the_deviation_from_the_mean():
    cfg = make_config(1)
    cfg.algorithm.advantage.normalize_by_std = False
    (minibatch,) = build_batch(GROUPS[:1], cfg, version=0).minibatches
    assert [s.advantage for s in minibatch] == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_an_unscorable_response_has_no_advantage():
    nan = float("nan")
    group = make_group(0, [1.0, 0.0, nan], [1.0, -1.0, nan])
    (minibatch,) = build_batch([group], make_config(1), version=0).minibatches
    assert minibatch[2].advantage == 0.0
    assert minibatch[0].advantage == pytest.approx(-minibatch[1].advantage)


def test_evaluation_is_the_mean_over_scored_samples_by_source():
    metrics = summarize([make_group(0, [1.0, 1.0]), make_group(1, [0.0, float("nan")])])
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3)
    assert metrics["eval/samples"] == 4
    assert "eval/test/accuracy" not in metrics
