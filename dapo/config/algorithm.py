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
    "gspo": PolicyLoss("one ratio per response (bounds 3e-4 and 4e-4)", CLIP[:2]),
    "cispo": PolicyLoss("the detached clipped ratio as a weight", CLIP[:2]),
    "sapo": PolicyLoss(
        "a smooth gate in place of the clip",
        ("sapo.tau_positive", "sapo.tau_negative"),
    ),
    "gmpo": PolicyLoss("the geometric mean of clipped ratios", ("gmpo.low", "gmpo.high")),
    "dppo_tv": PolicyLoss(
        "trust region of total variation",
        ("dppo.max_tv", "dppo.max_ratio"),
        of_engines=True,
    ),
    "dppo_kl": PolicyLoss("trust region of KL", ("dppo.max_kl", "dppo.max_ratio"), of_engines=True),
    "clip_cov": PolicyLoss(
        "`clip` without some tokens of high covariance (bounds 1 and 1)",
        (*CLIP, "clip_cov.share", "clip_cov.lower", "clip_cov.upper"),
    ),
    "kl_cov": PolicyLoss(
        "a penalty on such tokens in place of the clip",
        ("kl_cov.share", "kl_cov.coeff"),
    ),
    "reinforce": PolicyLoss(
        "the log-probability without a ratio",
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
    "rloo": Advantage("the mean of the others in it", by_group=True),
    "reinforce_plus_plus": Advantage(
        "the mean over all tokens of the batch",
        by_group=False,
    ),
    "gdpo": Advantage(
        "the mean of its group in each part of the reward (with `whiten=true`)",
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
    """A response is compared with the others of its prompt (Eq. 9)."""

    function: str = one_of_or_own(
        tuple(ADVANTAGES),
        "group",
        "a response is compared with: "
        + "; ".join(f"`{name}`, {each.text}" for name, each in ADVANTAGES.items())
        + "; or yours, FILE.py:FUNCTION (dapo/algorithm/own/README.md)",
        verl="algorithm.adv_estimator",
        trl="multi_objective_aggregation",
    )
    normalize_by_std: bool = key(
        True,
        "`group`, `gdpo`: divide by the group's standard deviation (Eq. 9); false: Dr. GRPO",
        verl="algorithm.norm_adv_by_std_in_grpo",
        trl="scale_rewards",
    )
    whiten: bool = key(
        False,
        "scale the advantages of the batch to root mean square 1",
    )


@dataclass(slots=True)
class KLConfig:
    """A penalty holds the policy near the first model. One of the two coefficients may be above 0."""

    estimator: str = one_of(
        KL_ESTIMATORS,
        "k3",
        "`k1`: log-ratio; `k2`: half its square; `k3`: ratio - 1 - log-ratio",
        verl=f"{ACTOR}.kl_loss_type, algorithm.kl_penalty",
    )
    loss_coeff: float = at_least(0, 0.0, "factor of the distance in the loss", verl=f"{ACTOR}.kl_loss_coef", trl="beta")
    reward_coeff: float = at_least(
        0,
        0.0,
        "factor of the distance, summed over a response, taken off its reward",
        verl="algorithm.kl_ctrl.kl_coef",
    )


@dataclass(slots=True)
class RolloutCorrectionConfig:
    """A detached weight, exp(old - rollout log-probability), corrects for tokens that another policy sampled."""

    mode: str = one_of(
        CORRECTION_MODES,
        "none",
        "`truncate`: cap the weight at `upper`; `mask`: drop weights outside of [`lower`, `upper`]; `icepop`: "
        "`mask` with 0.5 and 5 per token (arXiv 2510.18855); `none`",
        verl="algorithm.rollout_correction",
        trl="vllm_importance_sampling_mode",
    )
    level: str = one_of(
        CORRECTION_LEVELS,
        "token",
        "weight per `token`; per `sequence`: the product of its tokens; `geometric`: their geometric mean "
        "(bounds near 1: 1.001, 0.999)",
        verl="algorithm.rollout_correction.rollout_is",
        trl="vllm_importance_sampling_mode",
    )
    upper: float = positive(
        2.0,
        "upper bound of the weight",
        verl="algorithm.rollout_correction.rollout_is_threshold",
        trl="vllm_importance_sampling_clip_max, vllm_importance_sampling_cap",
    )
    lower: float = positive(0.5, "lower bound, for `mask`", trl="vllm_importance_sampling_clip_min")
    use_rollout_logprobs: bool = key(
        False,
        "take the engines' log-probabilities as the old ones; needs `mode=none` (except `reinforce`)",
        verl="algorithm.rollout_correction.bypass_mode",
    )
    off_policy_mask_threshold: float = at_least(
        0,
        0.0,
        "drop responses of negative advantage whose mean engine log-probability exceeds the policy's by more "
        "(arXiv 2512.02556, Eq. 9)",
        "; 0: no mask",
        trl="off_policy_mask_threshold",
    )
    max_mean_stale_logprob_diff: float = positive(
        0.5,
        "as `weight_sync.max_mean_logprob_diff`, for tokens of older policies",
        resume="harmless",
    )


@dataclass(slots=True)
class SapoConfig:
    """Temperatures of the gate of `sapo`: the higher, the sooner it closes."""

    tau_positive: float = positive(1.0, "for positive advantages", verl=f"{ACTOR}.tau_pos", trl="sapo_temperature_pos")
    tau_negative: float = positive(1.05, "for the others", verl=f"{ACTOR}.tau_neg", trl="sapo_temperature_neg")


@dataclass(slots=True)
class GmpoConfig:
    """Bounds of `gmpo` on the log-ratio of a token."""

    low: float = positive(0.4, "lower bound is minus this, for negative advantages")
    high: float = positive(0.4, "upper bound, for positive advantages")


@dataclass(slots=True)
class DppoConfig:
    """`dppo_tv` and `dppo_kl` drop a token that moved too far from the engine's probability of it."""

    max_tv: float = share(0.15, "`dppo_tv`: bound on the difference of the probabilities")
    max_kl: float = positive(0.05, "`dppo_kl`: bound on KL(engine || policy), in nats")
    max_ratio: float = key(
        20.0,
        "cap of the detached ratio that weighs a token, above 1",
        values="above 1",
        holds=lambda value: value > 1,
    )


@dataclass(slots=True)
class ClipCovConfig:
    """`clip_cov` looks for tokens with a high (log-probability - its mean) x (advantage - its mean)."""

    share: float = share(
        2e-4,
        "part of the tokens dropped, at random between the bounds",
        verl=f"{ACTOR}.policy_loss.clip_cov_ratio, {ACTOR}.clip_cov_ratio",
    )
    lower: float = key(1.0, "lower bound of the product", verl=f"{ACTOR}.policy_loss.clip_cov_lb, {ACTOR}.clip_cov_lb")
    upper: float = key(5.0, "upper bound of the product", verl=f"{ACTOR}.policy_loss.clip_cov_ub, {ACTOR}.clip_cov_ub")


@dataclass(slots=True)
class KlCovConfig:
    """`kl_cov` takes the tokens with the highest such product."""

    share: float = share(
        2e-3,
        "part of the tokens that is held near the old policy",
        "; published are 2e-3 for 7B and 2e-4 for 32B",
        verl=f"{ACTOR}.policy_loss.kl_cov_ratio",
    )
    coeff: float = positive(1.0, "factor of |log-ratio| in their loss", verl=f"{ACTOR}.policy_loss.ppo_kl_coef")


@dataclass(slots=True)
class AlgorithmConfig:
    """Rewards become advantages, advantages become a loss (Eqs. 8-12)."""

    advantage: AdvantageConfig = section(AdvantageConfig)
    policy_loss: str = one_of_or_own(
        tuple(POLICY_LOSSES),
        "clip",
        "; ".join(f"`{name}`: {each.text}" for name, each in POLICY_LOSSES.items())
        + "; or yours, FILE.py:FUNCTION (dapo/algorithm/own/README.md)",
        verl=f"{ACTOR}.policy_loss.loss_mode",
        trl="importance_sampling_level, loss_type",
    )
    clip_ratio_low: float = share(
        0.2,
        "the ratio is clipped below at 1 - this",
        "; 0.2 is the published value, 1 suits `cispo`",
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
        "bound of the ratio for negative advantages (dual clip), above 1",
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
        "weight of a token: equal over the batch (Eq. 12), its group, its response; a sum per response; that "
        "sum over a fixed length",
        verl=f"{ACTOR}.loss_agg_mode",
        trl="loss_type",
    )
    token_weights: str = own(
        "your function for the weights of tokens, FILE.py:FUNCTION",
    )
    entropy_top_share: float = share(
        1.0,
        "part of the tokens, those of highest entropy, that carry the policy loss",
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
        "likely tokens per position, to subtract the mean gradient under the engine (arXiv 2609.20807: 128); 0: off",
        values=f"0 to {MAX_SUPPORT}",
        holds=lambda value: 0 <= value <= MAX_SUPPORT,
    )


def corrects(cfg: AlgorithmConfig) -> bool:
    """Whether the loss corrects for tokens that another policy sampled than the one that trains: by a weight, by its
    own ratio to the engines, or by centering."""
    ratio_to_engines = cfg.rollout_correction.use_rollout_logprobs and cfg.policy_loss != "reinforce"
    return cfg.rollout_correction.mode != "none" or ratio_to_engines or cfg.score_centering > 0
