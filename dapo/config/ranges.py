"""Ranges of single numbers in the configuration: part of the checks before any worker starts (`dapo.config.checks`).

In: a `Config`. Out: one line per value out of its range, with key, value and range.
"""

import math
from collections.abc import Callable, Iterator

from dapo.config.schema import Config


def numbers(cfg: Config) -> Iterator[str]:
    """Ranges of single values: (bound in words, test, values by key)."""
    ranges: list[tuple[str, Callable[[float], bool], dict[str, float]]] = [
        ("at least 1", lambda value: value >= 1, _counts(cfg)),
        ("at least 2: the advantage compares the responses of a group", lambda v: v >= 2, {"rollout.n": cfg.rollout.n}),
        ("0 or more", lambda value: 0 <= value < math.inf, _not_negative(cfg)),
        ("greater than 0", lambda value: 0 < value < math.inf, _positive(cfg)),
        (
            "in (0, 1]; 1.0 keeps every token",
            lambda value: 0 < value <= 1,
            {"rollout.top_p": cfg.rollout.top_p, "eval.top_p": cfg.eval.top_p},
        ),
        (
            "above 0 and at most 1; 0.2 is the published value (1, no lower bound, suits cispo)",
            lambda value: 0 < value <= 1,
            {"algorithm.clip_ratio_low": cfg.algorithm.clip_ratio_low},
        ),
        (
            "in [0, 1], a share of the distinct prompts",
            lambda value: 0 <= value <= 1,
            {"data.max_contradictory": cfg.data.max_contradictory},
        ),
        (
            "above 1; 10.0 is the published value",
            lambda value: value > 1,
            {"algorithm.clip_ratio_c": cfg.algorithm.clip_ratio_c},
        ),
    ]
    for words, holds, values in ranges:
        for key, value in values.items():
            if not holds(value):
                yield f"`{key}` ({value}) must be {words}"
    betas = cfg.actor.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"`actor.optim.betas` ({betas}) must be two numbers in [0, 1)"


def _counts(cfg: Config) -> dict[str, float]:
    return {
        "data.train_batch_size": cfg.data.train_batch_size,
        "data.gen_batch_size": cfg.data.gen_batch_size,
        "data.max_prompt_length": cfg.data.max_prompt_length,
        "data.max_response_length": cfg.data.max_response_length,
        "rollout.num_engines": cfg.rollout.num_engines,
        "rollout.cpu_threads": cfg.rollout.cpu_threads,
        "eval.n": cfg.eval.n,
        "reward.num_workers": cfg.reward.num_workers,
        "reward.children_per_worker": cfg.reward.children_per_worker,
        "reward.limits.memory_bytes": cfg.reward.limits.memory_bytes,
        "actor.num_workers": cfg.actor.num_workers,
        "actor.cpu_threads": cfg.actor.cpu_threads,
        "actor.max_tokens_per_gpu": cfg.actor.max_tokens_per_gpu,
        "actor.ppo_mini_batch_size": cfg.actor.ppo_mini_batch_size,
        "actor.ppo_epochs": cfg.actor.ppo_epochs,
        "trainer.total_steps": cfg.trainer.total_steps,
        "weight_sync.bucket_bytes": cfg.weight_sync.bucket_bytes,
    }


def _not_negative(cfg: Config) -> dict[str, float]:
    return {
        "eval.every": cfg.eval.every,
        "eval.temperature": cfg.eval.temperature,
        "filter_groups.max_num_gen_batches": cfg.filter_groups.max_num_gen_batches,
        "filter_groups.max_staleness": cfg.filter_groups.max_staleness,
        "checkpoint.every": cfg.checkpoint.every,
        "checkpoint.keep": cfg.checkpoint.keep,
        "logging.samples": cfg.logging.samples,
        "actor.optim.lr_warmup_steps": cfg.actor.optim.lr_warmup_steps,
        "actor.optim.weight_decay": cfg.actor.optim.weight_decay,
        "reward.overlong_buffer.penalty_factor": cfg.reward.overlong_buffer.penalty_factor,
        "reward.limits.file_bytes": cfg.reward.limits.file_bytes,
        "trainer.seed": cfg.trainer.seed,
        "algorithm.kl.loss_coeff": cfg.algorithm.kl.loss_coeff,
        "algorithm.kl.reward_coeff": cfg.algorithm.kl.reward_coeff,
        "algorithm.entropy_coeff": cfg.algorithm.entropy_coeff,
    }


def _positive(cfg: Config) -> dict[str, float]:
    return {
        "rollout.temperature": cfg.rollout.temperature,
        "rollout.start_timeout_s": cfg.rollout.start_timeout_s,
        "rollout.timeout_s": cfg.rollout.timeout_s,
        "reward.timeout_s": cfg.reward.timeout_s,
        "reward.limits.cpu_s": cfg.reward.limits.cpu_s,
        "reward.limits.wall_s": cfg.reward.limits.wall_s,
        "actor.start_timeout_s": cfg.actor.start_timeout_s,
        "actor.timeout_s": cfg.actor.timeout_s,
        "actor.optim.lr": cfg.actor.optim.lr,
        "actor.optim.eps": cfg.actor.optim.eps,
        "actor.optim.grad_clip": cfg.actor.optim.grad_clip,
        "algorithm.clip_ratio_high": cfg.algorithm.clip_ratio_high,
        "algorithm.rollout_correction.lower": cfg.algorithm.rollout_correction.lower,
        "algorithm.rollout_correction.upper": cfg.algorithm.rollout_correction.upper,
        "algorithm.rollout_correction.max_mean_stale_logprob_diff": (
            cfg.algorithm.rollout_correction.max_mean_stale_logprob_diff
        ),
        "weight_sync.max_mean_logprob_diff": cfg.weight_sync.max_mean_logprob_diff,
        "weight_sync.timeout_s": cfg.weight_sync.timeout_s,
        "checkpoint.timeout_s": cfg.checkpoint.timeout_s,
    }
