"""Choices of the objective: values that are not allowed, those that do not go together, and those that do."""

import pytest

from dapo.config.compose import compose
from dapo.config.schema import Config

CORRECTION = "algorithm.rollout_correction"
GEOMETRIC = [f"{CORRECTION}.mode=mask", f"{CORRECTION}.level=geometric"]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param(
            ["algorithm.policy_loss=gspo"],
            ["`algorithm.clip_ratio_low` (0.2)", "`algorithm.clip_ratio_high` (0.28)", "gspo", "0.0003 and 0.0004"],
            id="gspo with the bounds of single tokens",
        ),
        pytest.param(
            ["algorithm.kl.loss_coeff=0.1", "algorithm.kl.reward_coeff=0.2"],
            ["`algorithm.kl.loss_coeff` (0.1)", "`algorithm.kl.reward_coeff` (0.2)", "set one of them to 0"],
            id="KL twice",
        ),
        pytest.param(
            [f"{CORRECTION}.use_rollout_logprobs=true", f"{CORRECTION}.mode=truncate"],
            [f"`{CORRECTION}.mode` (truncate)", f"`{CORRECTION}.use_rollout_logprobs`", "set mode to none or"],
            id="correction twice",
        ),
        pytest.param(
            [f"{CORRECTION}.mode=mask", f"{CORRECTION}.lower=1.5"],
            [f"`{CORRECTION}.lower` (1.5)", "`upper` (2.0)", "must enclose 1"],
            id="mask above 1",
        ),
        pytest.param(
            [f"{CORRECTION}.mode=mask", f"{CORRECTION}.upper=0.9"],
            [f"`{CORRECTION}.lower` (0.5)", "`upper` (0.9)", "must enclose 1"],
            id="mask below 1",
        ),
        pytest.param([f"{CORRECTION}.upper=0"], [f"`{CORRECTION}.upper` (0.0)", "greater than 0"], id="no weight"),
        pytest.param(
            [f"{CORRECTION}.max_mean_stale_logprob_diff=0"],
            [f"`{CORRECTION}.max_mean_stale_logprob_diff` (0.0)", "greater than 0"],
            id="stale bound",
        ),
        pytest.param(
            ["algorithm.policy_loss=ppo"], ["`algorithm.policy_loss` (ppo)", "clip, gspo, cispo"], id="policy loss"
        ),
        pytest.param(["algorithm.kl.estimator=k4"], ["`algorithm.kl.estimator` (k4)", "k1, k2, k3"], id="estimator"),
        pytest.param([f"{CORRECTION}.mode=tis"], [f"`{CORRECTION}.mode` (tis)", "none, truncate, mask"], id="mode"),
        pytest.param([f"{CORRECTION}.level=seq"], [f"`{CORRECTION}.level` (seq)", "token, sequence"], id="level"),
        pytest.param(
            ["actor.optim.lr_scheduler=cosin"], ["`actor.optim.lr_scheduler` (cosin)", "cosine, "], id="schedule"
        ),
        pytest.param(
            ["actor.optim.lr_scheduler_unit=epoch"],
            ["`actor.optim.lr_scheduler_unit` (epoch)", "rollout_step, optimizer_step"],
            id="unit",
        ),
        pytest.param(
            ["algorithm.kl.loss_coeff=-0.1"], ["`algorithm.kl.loss_coeff` (-0.1)", "0 or more"], id="negative KL"
        ),
        pytest.param(
            ["algorithm.kl.reward_coeff=-1"], ["`algorithm.kl.reward_coeff` (-1.0)", "0 or more"], id="negative penalty"
        ),
        pytest.param(
            ["algorithm.entropy_coeff=-1"], ["`algorithm.entropy_coeff` (-1.0)", "0 or more"], id="negative entropy"
        ),
        pytest.param(
            ["algorithm.clip_ratio_low=0"], ["`algorithm.clip_ratio_low` (0.0)", "0.2 is the published"], id="low of 0"
        ),
        pytest.param(["algorithm.clip_ratio_low=1.1"], ["`algorithm.clip_ratio_low` (1.1)", "at most 1"], id="low"),
        pytest.param(
            ["algorithm.clip_ratio_high=0"], ["`algorithm.clip_ratio_high` (0.0)", "greater than 0"], id="high"
        ),
        pytest.param(["algorithm.clip_ratio_c=1"], ["`algorithm.clip_ratio_c` (1.0)", "10.0 is the published"], id="c"),
        pytest.param(["actor.ppo_epochs=0"], ["`actor.ppo_epochs` (0)", "at least 1"], id="no epoch"),
        pytest.param(
            GEOMETRIC, [f"`{CORRECTION}.upper` (2.0)", "geometric", "1.001", "0.999"], id="bounds of single tokens"
        ),
        pytest.param(
            ["algorithm.advantage.function=reinforce_plus_plus", "algorithm.advantage.whiten=true"],
            ["`algorithm.advantage.whiten` (true)", "reinforce_plus_plus", "set it to false"],
            id="normalized twice",
        ),
        pytest.param(
            ["filter_groups.function=my.py:keep", "filter_groups.enable=false"],
            ["`filter_groups.function` (my.py:keep)", "`filter_groups.enable`", "set that to true"],
            id="a filter that is not asked",
        ),
        pytest.param(
            ["algorithm.advantage.function=gae"],
            ["`algorithm.advantage.function` (gae)", "group, rloo, reinforce_plus_plus, gdpo, or FILE.py:FUNCTION"],
            id="unknown advantage",
        ),
        pytest.param(
            ["algorithm.policy_loss=my.py"], ["`algorithm.policy_loss` (my.py)", "FILE.py:FUNCTION"], id="no function"
        ),
        pytest.param(
            ["algorithm.token_weights=token-mean"],
            ["`algorithm.token_weights` (token-mean)", "empty, or FILE.py:FUNCTION"],
            id="weights by a name",
        ),
        pytest.param(
            ["algorithm.entropy_top_share=0"],
            ["`algorithm.entropy_top_share` (0.0)", "above 0 and at most 1", "0.2 is the published"],
            id="no token left",
        ),
    ],
)
def test_each_problem_of_the_objective_is_one_line_with_key_value_and_remedy(overrides, parts):
    with pytest.raises(ValueError) as error:
        compose(overrides, "dapo_tiny")
    (line,) = str(error.value).splitlines()
    assert [part for part in parts if part not in line] == []


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ["algorithm.policy_loss=gspo", "algorithm.clip_ratio_low=3e-4", "algorithm.clip_ratio_high=4e-4"], id="gspo"
        ),
        pytest.param(["algorithm.policy_loss=cispo", "algorithm.clip_ratio_low=1"], id="cispo without lower bound"),
        pytest.param(["algorithm.kl.loss_coeff=0.1", "algorithm.kl.estimator=k1"], id="KL in the loss"),
        pytest.param(["algorithm.kl.reward_coeff=0.1"], id="KL in the reward"),
        pytest.param([f"{CORRECTION}.use_rollout_logprobs=true"], id="the engine's log-probabilities"),
        pytest.param([f"{CORRECTION}.mode=mask", f"{CORRECTION}.level=sequence"], id="mask"),
        pytest.param([f"{CORRECTION}.mode=truncate", f"{CORRECTION}.lower=1.5"], id="truncation has no lower bound"),
        pytest.param(
            ["actor.optim.lr_scheduler=cosine_with_min_lr", "actor.optim.lr_scheduler_kwargs.min_lr_rate=0.1"],
            id="argument of the schedule",
        ),
        pytest.param(
            ["actor.optim.lr_scheduler=cosine_with_min_lr", "actor.optim.lr_scheduler_kwargs={min_lr_rate: 0.1}"],
            id="all arguments at once",
        ),
        pytest.param(["reward.overlong_filtering.enable=true", "actor.ppo_epochs=2"], id="filtering"),
        pytest.param([*GEOMETRIC, f"{CORRECTION}.lower=0.999", f"{CORRECTION}.upper=1.001"], id="geometric"),
        pytest.param([f"{CORRECTION}.level=geometric"], id="a level without a correction"),
        pytest.param(["algorithm.advantage.function=gdpo", "algorithm.advantage.whiten=true"], id="gdpo"),
        pytest.param(["algorithm.policy_loss=some/folder/my.py:loss_2"], id="own loss"),
        pytest.param(["algorithm.entropy_top_share=0.2"], id="high entropy"),
    ],
)
def test_choices_of_the_objective_that_go_together(overrides):
    assert isinstance(compose(overrides, "dapo_tiny"), Config)
