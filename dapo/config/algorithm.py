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
CLIP = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")  # of the key `algorithm`, also for a loss of one's own


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A built-in policy loss (`dapo.algorithm.objective` calls it). text: what it does. keys: its parameters, below
    `algorithm`; those of other losses keep their defaults. of_engines: whether it compares the policy with the engines
    alone and needs `use_rollout_logprobs`."""

    text: str
    keys: tuple[str, ...] = CLIP
    of_engines: bool = False


POLICY_LOSSES = {
    "clip": PolicyLoss("clip-higher with dual clip (Eqs. 8-10)"),
    "gspo": PolicyLoss("one ratio per response (arXiv 2507.18071, bounds 3e-4 and 4e-4)", CLIP[:2]),
    "cispo": PolicyLoss("the detached clipped ratio as a weight (arXiv 2506.13585)", CLIP[:2]),
    "sapo": PolicyLoss(
        "a gate that closes smoothly in place of the clip (arXiv 2511.20347)",
        ("sapo.tau_positive", "sapo.tau_negative"),
    ),
    "gmpo": PolicyLoss(
        "one ratio per response, the geometric mean of clipped ones (arXiv 2507.20673)", ("gmpo.low", "gmpo.high")
    ),
    "dppo_tv": PolicyLoss(
        "no move away from the engines' policy beyond a total variation (arXiv 2602.04879)",
        ("dppo.max_tv", "dppo.max_ratio"),
        of_engines=True,
    ),
    "dppo_kl": PolicyLoss("the same for the KL divergence", ("dppo.max_kl", "dppo.max_ratio"), of_engines=True),
    "clip_cov": PolicyLoss(
        "`clip` without some of the tokens whose log-probability and advantage are high together (arXiv 2505.22617, "
        "bounds 1 and 1)",
        (*CLIP, "clip_cov.share", "clip_cov.lower", "clip_cov.upper"),
    ),
    "kl_cov": PolicyLoss(
        "the ratio as it is, with a penalty on the change of such tokens (the same paper)",
        ("kl_cov.share", "kl_cov.coeff"),
    ),
    "reinforce": PolicyLoss(
        "the log-probability, weighted by `rollout_correction` with the policy of each optimizer step (arXiv "
        "2402.14740)",
        (),
        of_engines=True,
    ),
}
BY_COVARIANCE = ("clip_cov", "kl_cov")  # losses that choose tokens of a mini-batch before it trains


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
CORRECTION_MODES = ("none", "truncate", "mask", "icepop")
ICEPOP = (0.5, 5.0)  # the published bounds
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
        "[`lower`, `upper`], `icepop` is `mask` per token with the bounds 0.5 and 5 (arXiv 2510.18855)",
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
        "take the engine's log-probabilities for the old ones instead of computing them again; then the ratio of the "
        "loss is the correction, `mode` must be none (except with `reinforce`, which has no ratio), and of several "
        "mini-batches only the first is compared with the engines before it trains",
        verl="algorithm.rollout_correction.bypass_mode",
    )
    off_policy_mask_threshold: float = at_least(
        0,
        0.0,
        "a response with a negative advantage has no policy loss if the mean over its tokens of log-probability of "
        "the engines - of the policy is above this, in nats (off-policy sequence mask, arXiv 2512.02556, Eq. 9)",
        "; 0: no mask; there is no published value",
        trl="off_policy_mask_threshold",
    )
    max_mean_stale_logprob_diff: float = positive(
        0.5,
        "bound on the mean of |log-probability of the actors - of the engines| over tokens of older policies, in nats; "
        "above it the batch is set aside (tokens of the current policy: `weight_sync.max_mean_logprob_diff`)",
        resume="harmless",
    )


@dataclass(slots=True)
class SapoConfig:
    """Temperatures of the gate of `sapo`: the higher, the sooner it closes where the ratio leaves 1."""

    tau_positive: float = positive(
        1.0, "where the advantage is positive", verl=f"{ACTOR}.tau_pos", trl="sapo_temperature_pos"
    )
    tau_negative: float = positive(1.05, "where it is not", verl=f"{ACTOR}.tau_neg", trl="sapo_temperature_neg")


@dataclass(slots=True)
class GmpoConfig:
    """Bounds of `gmpo` on the log-ratio of a token."""

    low: float = positive(0.4, "it is clipped below at minus this, where the advantage is negative")
    high: float = positive(0.4, "it is clipped above at this, where the advantage is positive")


@dataclass(slots=True)
class DppoConfig:
    """`dppo_tv` and `dppo_kl` drop a token that has moved away from the engine's probability of it, in the direction
    of its advantage, by more than a bound. The divergence is of two outcomes: this token or any other."""

    max_tv: float = share(0.15, "bound of `dppo_tv` on the difference of the probabilities")
    max_kl: float = positive(0.05, "bound of `dppo_kl` on KL(engine || policy), in nats")
    max_ratio: float = key(
        20.0,
        "cap of the detached ratio that weighs a token, of both; the paper advises a large one",
        values="above 1",
        holds=lambda value: value > 1,
    )


@dataclass(slots=True)
class ClipCovConfig:
    """`clip_cov` looks for tokens with a high (log-probability - its mean) x (advantage - its mean), means over the
    mini-batch, log-probabilities of before the update."""

    share: float = share(
        2e-4,
        "part of a mini-batch's tokens that has no policy loss, drawn at random from those between the bounds",
        verl=f"{ACTOR}.policy_loss.clip_cov_ratio, {ACTOR}.clip_cov_ratio",
    )
    lower: float = key(1.0, "lower bound of the product", verl=f"{ACTOR}.policy_loss.clip_cov_lb, {ACTOR}.clip_cov_lb")
    upper: float = key(5.0, "upper bound of the product", verl=f"{ACTOR}.policy_loss.clip_cov_ub, {ACTOR}.clip_cov_ub")


@dataclass(slots=True)
class KlCovConfig:
    """`kl_cov` takes the tokens for which the product that `clip_cov` looks at is highest, and positive."""

    share: float = share(
        2e-3,
        "part of a mini-batch's tokens that is held near the old policy",
        "; published are 2e-3 for 7B and 2e-4 for 32B",
        verl=f"{ACTOR}.policy_loss.kl_cov_ratio",
    )
    coeff: float = positive(1.0, "factor of |log-ratio| in their loss", verl=f"{ACTOR}.policy_loss.ppo_kl_coef")


@dataclass(slots=True)
class AlgorithmConfig:
    """The objective turns rewards into advantages and advantages into a loss (Eqs. 8-12)."""

    advantage: AdvantageConfig = section(AdvantageConfig)
    policy_loss: str = one_of_or_own(
        tuple(POLICY_LOSSES),
        "clip",
        "; ".join(f"`{name}`: {each.text}" for name, each in POLICY_LOSSES.items())
        + "; or a function of your own; what goes with what: dapo/algorithm/own/README.md",
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
    sapo: SapoConfig = section(SapoConfig)
    gmpo: GmpoConfig = section(GmpoConfig)
    dppo: DppoConfig = section(DppoConfig)
    clip_cov: ClipCovConfig = section(ClipCovConfig)
    kl_cov: KlCovConfig = section(KlCovConfig)
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


def corrects(cfg: AlgorithmConfig) -> bool:
    """Whether the loss corrects for tokens that another policy sampled than the one that trains: by a weight, by its
    own ratio to the engines, or by centering."""
    ratio_to_engines = cfg.rollout_correction.use_rollout_logprobs and cfg.policy_loss != "reinforce"
    return cfg.rollout_correction.mode != "none" or ratio_to_engines or cfg.score_centering > 0
