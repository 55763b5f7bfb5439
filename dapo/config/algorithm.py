"""The section `algorithm`: advantage, loss, KL penalty, correction for older policies. Defaults are the paper's (arXiv
2503.14476); everything that the paper does not use is off."""

from dataclasses import dataclass

from dapo.config.fields import at_least, key, one_of, one_of_or_own, own, positive, section, share

LOSS_AGG_MODES = (
    "token-mean",
    "group-token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
POLICY_LOSSES = ("clip", "gspo", "cispo")


@dataclass(frozen=True, slots=True)
class Advantage:
    """A built-in advantage function (`dapo.algorithm.batch` calls it). text: what a response is compared with.
    by_group: whether it depends on the response's own group alone."""

    text: str
    by_group: bool


ADVANTAGES = {
    "group": Advantage("the mean of its group (Eq. 9)", by_group=True),
    "rloo": Advantage("the mean of the others in it (arXiv 2402.14740)", by_group=True),
    "reinforce_plus_plus": Advantage(
        "the mean over all tokens of the batch, in their standard deviations (arXiv 2501.03262; its version with a "
        "baseline per prompt is `group` with `normalize_by_std=false` and `whiten=true`)",
        by_group=False,
    ),
    "gdpo": Advantage(
        "the mean of its group in every part of the reward by itself (arXiv 2601.05242, with `whiten=true`)",
        by_group=True,
    ),
}
KL_ESTIMATORS = ("k1", "k2", "k3")
MAX_SUPPORT = 1024  # tokens per position that an engine returns in training
CORRECTION_MODES = ("none", "truncate", "mask")
CORRECTION_LEVELS = ("token", "sequence", "geometric")
ACTOR = "actor_rollout_ref.actor"  # of verl's names


@dataclass(slots=True)
class AdvantageConfig:
    """Group-relative advantages (Eq. 9) compare a response with the others of its prompt."""

    function: str = one_of_or_own(
        tuple(ADVANTAGES),
        "group",
        "what a response is compared with: "
        + "; ".join(f"`{name}`, {each.text}" for name, each in ADVANTAGES.items())
        + "; or a function of your own (dapo/algorithm/own/README.md)",
        verl="algorithm.adv_estimator",
        trl="multi_objective_aggregation",
    )
    normalize_by_std: bool = key(
        True,
        "`group` and `gdpo` divide by the standard deviation of the group (Eq. 9); false is Dr. GRPO",
        verl="algorithm.norm_adv_by_std_in_grpo",
        trl="scale_rewards",
    )
    whiten: bool = key(
        False,
        "scale the advantages of the whole batch to root mean square 1: where their mean is 0, as with `group`, `rloo` "
        "and `gdpo`, to standard deviation 1 (ddof 0)",
    )


@dataclass(slots=True)
class KLConfig:
    """A penalty holds the policy near the reference, the model of `model.path`, which is loaded only if one of the
    coefficients is not 0; only one may be."""

    estimator: str = one_of(
        KL_ESTIMATORS,
        "k3",
        "estimator of the distance per token: log-ratio, half its square, or ratio - 1 - log-ratio",
        verl=f"{ACTOR}.kl_loss_type, algorithm.kl_penalty",
    )
    loss_coeff: float = at_least(
        0, 0.0, "factor of the distance as a term of the loss", verl=f"{ACTOR}.kl_loss_coef", trl="beta"
    )
    reward_coeff: float = at_least(
        0,
        0.0,
        "factor of the distance, summed over a response's tokens, that is taken off its reward before advantages are "
        "computed",
        verl="algorithm.kl_ctrl.kl_coef",
    )


@dataclass(slots=True)
class RolloutCorrectionConfig:
    """Corrects the loss of a token that another policy sampled than the one that trains, by a detached weight made of
    exp(old - rollout log-probability)."""

    mode: str = one_of(
        CORRECTION_MODES,
        "none",
        "`truncate` caps the weight at `upper` (truncated importance sampling), `mask` gives 0 to a weight outside "
        "[`lower`, `upper`]",
        verl="algorithm.rollout_correction",
        trl="vllm_importance_sampling_mode",
    )
    level: str = one_of(
        CORRECTION_LEVELS,
        "token",
        "one weight per token; or of a whole response: the product over its tokens, or their geometric mean, "
        "which does not grow with the length, with bounds near 1 (1.001 and 0.999, say)",
        verl="algorithm.rollout_correction.rollout_is",
        trl="vllm_importance_sampling_mode",
    )
    upper: float = positive(
        2.0,
        "cap of the weight, or upper end of what `mask` keeps",
        verl="algorithm.rollout_correction.rollout_is_threshold",
        trl="vllm_importance_sampling_clip_max, vllm_importance_sampling_cap",
    )
    lower: float = positive(0.5, "lower end of what `mask` keeps", trl="vllm_importance_sampling_clip_min")
    use_rollout_logprobs: bool = key(
        False,
        "take the engine's log-probabilities for the old ones instead of computing them again; then there is nothing "
        "to correct, `mode` must be none, and of several mini-batches only the first is compared with the engines "
        "before it trains",
        verl="algorithm.rollout_correction.bypass_mode",
    )
    max_mean_stale_logprob_diff: float = positive(
        0.5,
        "bound on the mean of |log-probability of the actors - of the engines| over tokens of older policies, in nats; "
        "above it the batch is set aside (tokens of the current policy: `weight_sync.max_mean_logprob_diff`)",
        resume="harmless",
    )


@dataclass(slots=True)
class AlgorithmConfig:
    """The objective turns rewards into advantages and advantages into a loss (Eqs. 8-12)."""

    advantage: AdvantageConfig = section(AdvantageConfig)
    policy_loss: str = one_of_or_own(
        POLICY_LOSSES,
        "clip",
        "`clip`: clip-higher with dual clip (Eqs. 8-10); `gspo`: one ratio per response (arXiv 2507.18071, bounds 3e-4 "
        "and 4e-4); `cispo`: the detached clipped ratio as a weight (arXiv 2506.13585); or a function of your own "
        "(dapo/algorithm/own/README.md)",
        verl=f"{ACTOR}.policy_loss.loss_mode",
        trl="importance_sampling_level, loss_type",
    )
    clip_ratio_low: float = share(
        0.2,
        "the ratio is clipped below at 1 - this",
        "; 0.2 is the published value (1, no lower bound, suits cispo)",
        verl=f"{ACTOR}.clip_ratio_low",
        trl="epsilon",
    )
    clip_ratio_high: float = positive(
        0.28,
        "the ratio is clipped above at 1 + this (clip-higher)",
        verl=f"{ACTOR}.clip_ratio_high",
        trl="epsilon_high",
    )
    clip_ratio_c: float = key(
        10.0,
        "bound of the ratio where the advantage is negative (dual clip)",
        values="above 1; 10.0 is the published value",
        holds=lambda value: value > 1,
        verl=f"{ACTOR}.clip_ratio_c",
        trl="delta",
    )
    loss_agg_mode: str = one_of(
        LOSS_AGG_MODES,
        "token-mean",
        "weight of a token in the loss: equal over the batch (Eq. 12), equal within a group, within a response, its "
        "sum, or its sum over a fixed length",
        verl=f"{ACTOR}.loss_agg_mode",
        trl="loss_type",
    )
    token_weights: str = own(
        "a function of your own that gives the weights of tokens in place of `loss_agg_mode`, which it is told "
        "(dapo/algorithm/own/README.md)",
    )
    entropy_top_share: float = share(
        1.0,
        "part of the tokens of a mini-batch, those of the highest entropy before the update, that carry the policy "
        "loss; the others stay in the denominators; below 1 an update with one optimizer step needs one more forward "
        "pass",
        "; 0.2 is the published value (arXiv 2506.01939)",
        trl="top_entropy_quantile",
    )
    kl: KLConfig = section(KLConfig)
    entropy_coeff: float = at_least(
        0, 0.0, "factor of the entropy bonus", verl=f"{ACTOR}.entropy_coeff", trl="entropy_coef"
    )
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    score_centering: int = key(
        0,
        "most likely tokens of a position whose log-probabilities the engines return, so that the loss can subtract "
        "the gradient that the advantage has on average under the engine (arXiv 2609.20807); with truncated sampling "
        "all that could be sampled, whatever the number; 0: off; 128 is the published value",
        values=f"0 to {MAX_SUPPORT}",
        holds=lambda value: 0 <= value <= MAX_SUPPORT,
    )
