"""Names every metric once, with unit, formula and the names that other systems have for it.

In: the families of `usage_names.py` and `draw_names.py`, and those here. Out: `FAMILIES`, from which `python -m
dapo.report` writes dapo/report/README.md; and `undocumented`, what was logged under a name that is not here.
"""

import re
from collections.abc import Iterable

from dapo.report.draw_names import DRAWS
from dapo.report.metric import Family, Metric
from dapo.report.table import table
from dapo.report.usage_names import USAGE

PLACEHOLDER = re.compile(r"\{\w+\}")


def _spread(name: str, about: str, also: str = "") -> tuple[Metric, ...]:
    """Returns mean, standard deviation (ddof 0), least and greatest."""
    means = ", ".join(f"{other}/mean" for other in also.split(", ") if other)
    return (
        Metric(f"{name}_mean", "", f"mean of {about}", means),
        Metric(f"{name}_std", "", "its standard deviation (ddof 0)"),
        Metric(f"{name}_min", "", "the least"),
        Metric(f"{name}_max", "", "the greatest"),
    )


def _mismatch(prefix: str, of: str) -> tuple[Metric, ...]:
    """Returns what compares actors and engines over some tokens."""
    return (
        Metric(
            f"{prefix}mean_abs_logprob_diff",
            "nats",
            f"mean of abs(log-probability of the actors − of the engines){of}; above "
            "`weight_sync.max_mean_logprob_diff` the batch is set aside",
            "training/rollout_probs_diff_mean, sampling/sampling_logp_difference/mean" if not prefix else "",
        ),
        Metric(
            f"{prefix}max_abs_logprob_diff",
            "nats",
            f"the greatest{of}",
            "training/rollout_probs_diff_max, sampling/sampling_logp_difference/max" if not prefix else "",
        ),
        Metric(f"{prefix}ess", "share", f"effective sample size: (Σ ratio)² / (tokens × Σ ratio²){of}"),
        Metric(
            f"{prefix}corrected_share",
            "share",
            f"tokens whose ratio `algorithm.rollout_correction` truncated or masked{of}",
        ),
    )


ROLLOUT = Family(
    "rollout",
    "every group that the step used up, trained on or dropped",
    "dapo/report/metrics.py",
    (
        Metric("accuracy", "share", "mean accuracy of the responses that could be scored", "critic/score/mean, reward"),
        Metric("reward_mean", "", "mean reward, penalties included", "critic/rewards/mean, reward"),
        Metric("response_length_mean", "tokens", "mean length", "response_length/mean, completions/mean_length"),
        Metric("response_length_min", "tokens", "the shortest", "response_length/min, completions/min_length"),
        Metric("response_length_max", "tokens", "the longest", "response_length/max, completions/max_length"),
        Metric(
            "truncated",
            "share",
            "responses cut at `data.max_response_length`",
            "response_length/clip_ratio, completions/clipped_ratio",
        ),
        Metric("turns_mean", "", "runs of sampled tokens in a response, between which `rollout.function` gives others"),
    ),
)

REWARD = Family(
    "reward",
    "the same responses; with several reward functions, each by its name",
    "dapo/report/metrics.py",
    (
        Metric("overlong", "", "mean Soft Overlong Punishment (Eq. 13), 0 or below"),
        Metric("kl_penalty", "", "mean penalty for distance to the reference policy, of the groups trained on"),
        Metric(
            "failed_{reason}",
            "share",
            "responses whose scoring ended by `cpu` or `memory`, limits that make them wrong; for other reasons "
            "(`wall`, `crash`) they have no verdict, and never count as wrong",
        ),
        Metric("{part}", "", "mean of what a reward function returned under that name", "rewards/FUNCTION/mean"),
    ),
)

BUFFER = Family(
    "buffer",
    "the same groups",
    "dapo/report/metrics.py; `usable_rate`: dapo/sampling/buffer.py",
    (
        Metric("drawn", "groups", "groups that the step used up", "resample attempts = drawn / trained"),
        Metric("trained", "groups", "groups that were trained on"),
        Metric("mixed", "groups", "their accuracies are not all equal"),
        Metric("all_correct", "groups", "dropped: nothing is left to learn", "frac_reward_zero_std"),
        Metric("all_wrong", "groups", "dropped: no answer to learn from", "frac_reward_zero_std"),
        Metric("unscorable", "groups", "dropped: fewer than two responses could be scored"),
        Metric("usable_rate", "share", "running estimate of the share of usable groups, which the stream plans with"),
        Metric("trained_tokens", "tokens", "response tokens of the groups trained on"),
        Metric("dropped_tokens", "tokens", "response tokens of the others"),
        Metric(
            "length_ks",
            "share",
            "Kolmogorov–Smirnov distance between the lengths trained on and the lengths drawn: what the filter does to "
            "them",
        ),
    ),
)

BATCH = Family(
    "batch",
    "the groups trained on",
    "dapo/report/metrics.py",
    (
        *_spread("reward", "the reward", "critic/rewards"),
        *_spread("advantage", "the advantage, of responses that stay in the loss", "critic/advantages"),
        Metric("tokens_per_group_mean", "tokens", "mean response tokens of a group"),
        Metric("tokens_per_group_max", "tokens", "the most"),
        Metric("filtered", "share", "responses not in the loss: taken out by overlong filtering, or without a token"),
        Metric("staleness_mean", "updates", "mean over tokens of: version of the update − version that sampled it"),
        Metric("staleness_max", "updates", "the greatest; at most `filter_groups.max_staleness`"),
        Metric("stale_tokens", "share", "tokens of an older policy than the one that is updated"),
        Metric("crossed_responses", "share", "responses that two or more policy versions sampled"),
    ),
)

ACTOR = Family(
    "actor",
    "the tokens trained on, means over the optimizer steps taken",
    "workers/training/totals.py, workers/training/update.py",
    (
        Metric("loss", "", "weighted sum over a mini-batch's tokens", "actor/pg_loss, loss"),
        Metric("grad_norm", "", "L2 norm of the whole gradient before clipping", "actor/grad_norm, grad_norm"),
        Metric("lr", "", "learning rate of the last optimizer step", "actor/lr, learning_rate"),
        Metric("clip_fraction", "share", "tokens at a clip bound", "actor/pg_clipfrac, clip_ratio/region_mean"),
        Metric("clip_fraction_low", "share", "at 1 − `clip_ratio_low`", "clip_ratio/low_mean"),
        Metric("clip_fraction_high", "share", "at 1 + `clip_ratio_high`", "clip_ratio/high_mean"),
        Metric("dual_clip_fraction", "share", "at the bound `clip_ratio_c` of A < 0", "actor/pg_clipfrac_lower"),
        Metric("approx_kl", "nats", "mean of old − new log-probability", "actor/ppo_kl, approx_kl"),
        Metric("ratio_mean", "", "mean importance ratio new / old", "mean ratio"),
        Metric("ratio_max", "", "the greatest ratio"),
        Metric("ref_kl", "nats", "KL estimate to the reference policy; 0 without one", "actor/kl_loss, kl"),
        Metric("entropy", "nats", "mean entropy of the policy's next-token distribution", "actor/entropy, entropy"),
        Metric("optimizer_steps", "", "optimizer steps taken in this update"),
        Metric("skipped_steps", "", "not taken, because a number was not finite"),
        Metric("empty_steps", "", "not taken, because no token was to be trained"),
        Metric(
            "overflowed_steps", "", "not taken, because the scaled gradient overflowed; only with `model.dtype=float16`"
        ),
        Metric("loss_scale", "", "the loss is multiplied by it, the gradient divided; only with `model.dtype=float16`"),
        Metric("response_tokens", "tokens", "response tokens of the batch"),
    ),
)

PARITY = Family(
    "parity",
    "all response tokens before the update, actors against engines; over finite numbers; with "
    "`algorithm.rollout_correction.use_rollout_logprobs` those of the first optimizer step",
    "workers/training/totals.py",
    (
        *_mismatch("", ""),
        Metric("non_finite_tokens", "tokens", "tokens where one of the two has no finite log-probability"),
        *_mismatch("staleness_{n}/", ", of tokens n updates old (4: or older), where there are stale ones"),
    ),
)

PERF = Family(
    "perf",
    "the step; depends on timing",
    "dapo/measure/clock.py, dapo/report/metrics.py, dapo/pools.py",
    (
        Metric(
            "step_s",
            "s",
            "wall time from when the step begins to collect to its line; what lies between two steps, such as a "
            "checkpoint, is in none",
            "timing_s/step, perf/time_per_step",
        ),
        Metric("generation_s", "s", "in which an engine had requests", "timing_s/gen"),
        Metric("reward_s", "s", "in which responses waited for a verdict", "timing_s/reward"),
        Metric("reference_s", "s", "the reference policy's pass", "timing_s/ref"),
        Metric("sleep_s", "s", "in which engines on the actors' GPUs fell asleep; see `trainer.colocate`"),
        Metric("update_s", "s", "the update", "timing_s/update_actor"),
        Metric("sync_s", "s", "weights to the engines"),
        Metric("evaluation_s", "s", "in which the step waited for an evaluation to end, where one was under way"),
        Metric("driver_s", "s", "in which nothing else ran"),
        Metric("generation_tokens_per_s", "tokens/s", "tokens generated / `generation_s`"),
        Metric("update_tokens_per_s", "tokens/s", "response tokens trained on / `update_s`"),
        Metric(
            "tokens_per_s_per_gpu",
            "tokens/s",
            "prompt and response tokens trained on / (`step_s` × GPUs of all roles)",
            "perf/throughput",
        ),
        Metric("goodput", "share", "tokens trained on / tokens generated"),
        Metric("aborted_tokens", "tokens", "generated and lost: of draws that went back to the stream"),
        Metric("returned_draws", "draws", "went back to the stream at the end of the step"),
        Metric("length_ks", "share", "as `buffer/length_ks`, against every group generated"),
        Metric("driver_resident_bytes", "bytes", "resident memory of the driver"),
        Metric("restarted_engines", "", "engines restarted since the process began"),
        Metric("restarted_actors", "", "times that all actor ranks were restarted since the process began"),
        Metric("restarted_reward_workers", "", "reward workers replaced since the process began"),
        Metric("restarted_reward_children", "", "their child processes replaced since the process began"),
        Metric("restarted_function_workers", "", "workers of `rollout.function` replaced since the process began"),
        Metric("restarted_judges", "", "judges of the run's own started again since the process began"),
    ),
)

LEDGER = Family(
    "ledger",
    "the whole run so far; depends on timing",
    "dapo/sampling/draws.py",
    (
        Metric("drawn", "draws", "draws = the sum of all `draws_`"),
        *(
            Metric(f"draws_{state}", "draws", about)
            for state, about in (
                ("in_generation", "being generated"),
                ("in_reward", "being scored"),
                ("buffered", "scored, waiting for their step or in it"),
                ("to_retry", "back in the stream"),
                ("trained", "trained on"),
                ("all_correct", "dropped: all correct"),
                ("all_wrong", "dropped: all wrong"),
                ("unscorable", "dropped: could not be scored"),
                ("overlong", "dropped: overlong filtering left nothing to learn from"),
            )
        ),
        Metric("tokens_generated", "tokens", "response tokens generated"),
        Metric("goodput", "share", "of all tokens generated: trained on"),
        *(
            Metric(f"dropped_{reason}", "share", f"of all tokens generated: in groups dropped as {reason}")
            for reason in ("all_correct", "all_wrong", "unscorable", "overlong")
        ),
        *(
            Metric(f"wasted_{reason}", "share", about)
            for reason, about in (
                ("surplus", "of all tokens generated: beyond the batch at staleness 0"),
                ("stale", "of all tokens generated: older than `filter_groups.max_staleness`"),
                ("refused", "of all tokens generated: in batches that the ranks refused"),
                ("stopped", "of all tokens generated: in flight when a run was stopped, or lost in a fault"),
            )
        ),
    ),
)

EVAL = Family(
    "eval",
    "held-out problems, `eval.n` samples each; logged with the step whose policy gave all of them",
    "dapo/evaluate/summary.py",
    (
        Metric("accuracy", "share", "avg@n over problems; of named sets, over sets", "val-core/SOURCE/acc/mean@n"),
        Metric("pass@{k}", "share", "one of k samples is right, for k = 2, 4, 8 ... n (unbiased)"),
        Metric("best@{k}", "share", "best accuracy of k samples", "val-core/SOURCE/acc/best@n/mean"),
        Metric("maj@{k}", "share", "accuracy of the answer that most of k give", "val-core/SOURCE/acc/maj@n/mean"),
        Metric("{estimate}_low", "share", "of accuracy and @n: lower end of the 95 % interval over problems"),
        Metric("{estimate}_high", "share", "its upper end"),
        Metric("response_length_mean", "tokens", "mean length"),
        Metric("truncated", "share", "samples cut at the cap"),
        Metric("turns_mean", "", "runs of sampled tokens in a sample, as `rollout/turns_mean`"),
        Metric("unscored", "share", "samples without a verdict, which are left out"),
        Metric("samples", "", "of all problems"),
        Metric("{set}/{metric}", "", "each of these, of a named set or a data source"),
    ),
)

# What sinks show beside the metrics, of the groups that a step used up.
HISTOGRAMS = {"rollout/lengths": "tokens of each response", "rollout/pass_rates": "mean accuracy of each group"}
FAMILIES = (ROLLOUT, REWARD, BUFFER, *DRAWS, BATCH, ACTOR, PARITY, PERF, *USAGE, LEDGER, EVAL)


def undocumented(names: Iterable[str]) -> list[str]:
    """Returns those of the names of a metrics.jsonl that `FAMILIES` does not have."""
    known = re.compile("|".join(_pattern(name) for family in FAMILIES for name in family.names()))
    return sorted(name for name in set(names) - {"step"} if not known.fullmatch(name))


def _pattern(name: str) -> str:
    return "".join(".+" if PLACEHOLDER.fullmatch(part) else re.escape(part) for part in re.split(r"(\{\w+\})", name))


def tables() -> str:
    """Returns one Markdown table per family."""
    parts = []
    for family in FAMILIES:
        rows = [[f"`{metric.name}`", metric.unit, metric.about, _code(metric.also)] for metric in family.metrics]
        parts.append(
            f"### `{family.prefix}/`: {family.over}\n\nMade in {family.where}.\n\n"
            + table(("name", "unit", "what it is", "elsewhere"), rows)
        )
    return "\n\n".join(parts)


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" if "/" in name and " " not in name else name for name in names.split(", ") if name)
