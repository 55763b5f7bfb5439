"""Typed configuration of the objective: the section `algorithm` of `dapo.config`, and the choices it offers.

Every default is the paper's (arXiv 2503.14476); what the paper does without is off. This module imports no torch.
"""

from dataclasses import dataclass, field

LOSS_AGG_MODES = (
    "token-mean",
    "group-token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
POLICY_LOSSES = ("clip", "gspo", "cispo")
KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTION_MODES = ("none", "truncate", "mask")
CORRECTION_LEVELS = ("token", "sequence")


@dataclass(slots=True)
class AdvantageConfig:
    """normalize_by_std: divide by the group's standard deviation (Eq. 9); false is Dr. GRPO.

    whiten: scale the advantages of the whole batch, whose mean is 0, to standard deviation 1 (ddof 0).
    """

    normalize_by_std: bool = True
    whiten: bool = False


@dataclass(slots=True)
class KLConfig:
    """A penalty on the distance to the reference policy, the model of `model.path`; it is loaded only if one of the
    coefficients is not 0, and only one may be. estimator: one of `KL_ESTIMATORS`.

    loss_coeff: factor of the term in the loss. reward_coeff: factor of what is taken off a response's reward, the sum
    over its tokens, before advantages are computed.
    """

    estimator: str = "k3"
    loss_coeff: float = 0.0
    reward_coeff: float = 0.0


@dataclass(slots=True)
class RolloutCorrectionConfig:
    """For tokens sampled by another policy than the one that trains: each token's loss times a detached weight made of
    exp(old - rollout log-probability), per token or over the whole response (`level`).

    mode: `none`; `truncate` caps the weight at `upper` (truncated importance sampling); `mask` gives 0 to a weight
    outside [lower, upper]. use_rollout_logprobs: take the engine's log-probabilities for the old ones instead of
    recomputing them; then there is nothing to correct, mode must be none, and of several mini-batches only the first is
    compared with the engines before it trains. max_mean_stale_logprob_diff: bound on the mean of |log-probability of
    the actors - of the engines| over tokens of older policies, in nats; above it the run stops. For tokens of the
    current policy, see `weight_sync.max_mean_logprob_diff`.
    """

    mode: str = "none"
    level: str = "token"
    upper: float = 2.0
    lower: float = 0.5
    use_rollout_logprobs: bool = False
    max_mean_stale_logprob_diff: float = 0.5


@dataclass(slots=True)
class AlgorithmConfig:
    """policy_loss: `clip` (clip-higher with dual clip, Eqs. 8-10; clip_ratio_c bounds the dual clip), `gspo` (one ratio
    per response, arXiv 2507.18071: clip_ratio_low 3e-4, clip_ratio_high 4e-4) or `cispo` (detached clipped ratio as a
    weight, arXiv 2506.13585). loss_agg_mode: one of `LOSS_AGG_MODES`. entropy_coeff: factor of the entropy bonus.
    """

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy_loss: str = "clip"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    clip_ratio_c: float = 10.0
    loss_agg_mode: str = "token-mean"
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coeff: float = 0.0
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
