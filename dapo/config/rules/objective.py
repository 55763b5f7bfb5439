"""Checks of combinations of objective settings that are valid one by one."""

from collections.abc import Iterator

from dapo.config.schema import Config

MAX_GSPO_CLIP = 0.05  # a hundred times the published bounds; a larger value was meant for single tokens
MAX_GEOMETRIC = 1.1  # a mean difference of 0.1 nats per token; a larger value was meant for single tokens


def objective(cfg: Config) -> Iterator[str]:
    algorithm, kl = cfg.algorithm, cfg.algorithm.kl
    if algorithm.policy_loss == "gspo" and max(algorithm.clip_ratio_low, algorithm.clip_ratio_high) > MAX_GSPO_CLIP:
        yield (
            f"`algorithm.clip_ratio_low` ({algorithm.clip_ratio_low}) and `algorithm.clip_ratio_high` "
            f"({algorithm.clip_ratio_high}) bound a single token's ratio, but `algorithm.policy_loss` is gspo, whose "
            "ratio is a mean over the response; the published values are 0.0003 and 0.0004"
        )
    if kl.loss_coeff and kl.reward_coeff:
        yield (
            f"`algorithm.kl.loss_coeff` ({kl.loss_coeff}) and `algorithm.kl.reward_coeff` ({kl.reward_coeff}) would "
            "count the same distance twice; set one of them to 0"
        )
    if algorithm.advantage.function == "reinforce_plus_plus" and algorithm.advantage.whiten:
        yield (
            "`algorithm.advantage.whiten` (true) would scale once more what `algorithm.advantage.function` "
            "(reinforce_plus_plus) has normalized over the batch; set it to false"
        )
    if cfg.filter_groups.function and not cfg.filter_groups.enable:
        yield (
            f"`filter_groups.function` ({cfg.filter_groups.function}) is not asked where `filter_groups.enable` is "
            "false; set that to true, or leave the function out"
        )


def correction(cfg: Config) -> Iterator[str]:
    correction, staleness = cfg.algorithm.rollout_correction, cfg.filter_groups.max_staleness
    if correction.use_rollout_logprobs and correction.mode != "none":
        yield (
            f"`algorithm.rollout_correction.mode` ({correction.mode}) corrects log-probabilities of the actors, and "
            "`algorithm.rollout_correction.use_rollout_logprobs` takes the engine's instead; the ratio to the engine "
            "would count twice: set mode to none or use_rollout_logprobs to false"
        )
    if staleness and correction.mode == "none":
        yield (
            f"`filter_groups.max_staleness` ({staleness}) trains on tokens of older policies, and "
            "`algorithm.rollout_correction.mode` (none) does not correct for it; take truncate or mask (with "
            "`algorithm.rollout_correction.use_rollout_logprobs=false`)"
        )
    if correction.mode == "mask" and not correction.lower < 1 < correction.upper:
        yield (
            f"`algorithm.rollout_correction.lower` ({correction.lower}) and `upper` ({correction.upper}) must enclose "
            "1, the weight of a token on which both policies agree"
        )
    if correction.mode != "none" and correction.level == "geometric" and correction.upper > MAX_GEOMETRIC:
        yield (
            f"`algorithm.rollout_correction.upper` ({correction.upper}) bounds a single token's ratio, but `level` is "
            f"geometric, whose ratio is a mean over the response; give 1.001, say, and at most {MAX_GEOMETRIC} (with "
            "mask, and 0.999 as `lower`)"
        )
