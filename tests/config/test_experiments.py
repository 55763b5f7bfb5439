"""The experiments of config/experiment: each composes, and has the numbers that its name stands for."""

import pytest

from dapo.config.compose import compose, experiments
from dapo.config.schema import Config


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_composes_and_validates(name):
    cfg = compose([], name)
    assert isinstance(cfg, Config)
    assert cfg.trainer.output_dir.endswith(f"outputs/{name}")


def test_the_named_experiments_are_there():
    named = {
        "dapo_tiny",
        "dapo_qwen32b",
        "dapo_qwen7b",
        "dapo_qwen0.5b_1gpu",
        "dapo_tiny_1gpu",
        "grpo_tiny",
        "dr_grpo_tiny",
    }
    assert named <= set(experiments())


def test_the_objectives_of_the_tiny_experiments():
    settings = {}
    for name in ("dapo_tiny", "grpo_tiny", "dr_grpo_tiny"):
        cfg = compose([], name)
        algorithm = cfg.algorithm
        settings[name] = (
            algorithm.loss_agg_mode,
            algorithm.advantage.normalize_by_std,
            algorithm.clip_ratio_high,
            cfg.filter_groups.enable,
        )
    assert settings == {
        "dapo_tiny": ("token-mean", True, 0.28, True),
        "grpo_tiny": ("seq-mean-token-mean", True, 0.2, False),
        "dr_grpo_tiny": ("seq-mean-token-sum-norm", False, 0.2, False),
    }


def test_qwen32b_has_the_published_numbers():
    cfg = compose([], "dapo_qwen32b")
    assert (cfg.data.train_batch_size, cfg.rollout.n, cfg.actor.ppo_mini_batch_size) == (512, 16, 32)
    assert (cfg.data.max_prompt_length, cfg.data.max_response_length) == (2048, 20480)
    assert (cfg.reward.overlong_buffer.len, cfg.reward.overlong_buffer.penalty_factor) == (4096, 1.0)
    assert cfg.rollout.num_engines * cfg.rollout.vllm["tensor_parallel_size"] + cfg.actor.num_workers == 128
