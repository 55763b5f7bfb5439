"""The charts of the page, each with the metrics that it draws (`dapo/report/README.md`)."""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

AT_LIMIT = ("reward/failed_cpu", "reward/failed_memory")  # verdicts: the answer is wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A line chart. metrics: (name or pattern, label; for a pattern "": the part after "/"). top: of the axis, if
    known. note: for the reader."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    note: str = ""
    top: float | None = None
    without: tuple[str, ...] = ()

    def lines(self, names: Collection[str]) -> list[tuple[str, str]]:
        return [
            (name, label or name.partition("/")[2])
            for pattern, label in self.metrics
            for name in sorted(names)
            if fnmatchcase(name, pattern) and not any(fnmatchcase(name, one) for one in self.without)
        ]


CURVES = (
    Curve(
        title="Accuracy",
        unit="share",
        metrics=(("rollout/accuracy", "drawn groups"),),
        note="of every answer that a step used up, trained on or dropped",
        top=1.0,
    ),
    Curve(
        title="Reward",
        unit="",
        metrics=(("rollout/reward_mean", "drawn groups"), ("batch/reward_mean", "trained on")),
        note="penalties included",
    ),
    Curve(
        title="Reward by function",
        unit="",
        metrics=(("reward/*", ""),),
        without=("reward/failed_*",),
        note="means over the answers that have one",
    ),
    Curve(
        title="Answers without a verdict",
        unit="share",
        metrics=(("reward/failed_*", ""),),
        without=AT_LIMIT,
        note="by reason",
    ),
    Curve(
        title="Answers that are wrong for a limit",
        unit="share",
        metrics=tuple((name, name.rpartition("_")[2]) for name in AT_LIMIT),
        note="which their scoring ran into",
    ),
    Curve(
        title="Response length",
        unit="tokens",
        metrics=(("rollout/response_length_mean", "mean"), ("rollout/response_length_max", "longest")),
    ),
    Curve(
        title="Truncated answers",
        unit="share",
        metrics=(("rollout/truncated", "at the cap"), ("batch/filtered", "left out of the loss")),
    ),
    Curve(
        title="Entropy",
        unit="nats",
        metrics=(("actor/entropy", "policy"),),
        note="mean over the tokens trained on",
    ),
    Curve(
        title="KL divergence",
        unit="nats",
        metrics=(("actor/approx_kl", "to the policy before"), ("actor/ref_kl", "to the reference")),
    ),
    Curve(
        title="Importance ratio",
        unit="",
        metrics=(("actor/ratio_mean", "mean"), ("actor/ratio_max", "greatest")),
        note="new over old probability of a token",
    ),
    Curve(
        title="Clipped tokens",
        unit="share",
        metrics=(
            ("actor/clip_fraction_low", "lower bound"),
            ("actor/clip_fraction_high", "upper bound"),
            ("actor/dual_clip_fraction", "dual clip"),
        ),
    ),
    Curve(title="Gradient norm", unit="", metrics=(("actor/grad_norm", "before clipping"),)),
    Curve(title="Learning rate", unit="", metrics=(("actor/lr", "last optimizer step"),)),
    Curve(
        title="Actors against engines",
        unit="nats",
        metrics=(("parity/mean_abs_logprob_diff", "mean |difference of log-probabilities|"),),
        note="far below `weight_sync.max_mean_logprob_diff` when all is well",
    ),
    Curve(
        title="Staleness",
        unit="updates",
        metrics=(("batch/staleness_mean", "mean"), ("batch/staleness_max", "greatest")),
        note="age of a token when it is trained on",
    ),
    Curve(
        title="Tokens per second",
        unit="tokens/s",
        metrics=(("perf/generation_tokens_per_s", "generation"), ("perf/update_tokens_per_s", "update")),
    ),
    Curve(
        title="Goodput",
        unit="share",
        metrics=(("perf/goodput", "of the step"), ("ledger/goodput", "of the run")),
        note="tokens trained on, of those generated",
        top=1.0,
    ),
)
PATTERNS = (*[name for curve in CURVES for name, _ in curve.metrics], "perf/*_s")

FATES = {  # columns of a step's row: what they are
    "trained": "mixed, trained on",
    "all_wrong": "all wrong",
    "all_correct": "all right",
    "overlong": "overlong",
    "unscorable": "unscorable",
}
ROLES = {  # the phases in which each has work
    "engines": ("generation",),
    "reward workers": ("reward",),
    "actors": ("reference", "update"),
    "weights travel": ("sync",),
    "driver alone": ("driver",),
}
