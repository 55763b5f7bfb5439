"""Rules that find problems in a run: each reports what it found in figures, and which keys to change. The terminal and
the page show the same findings. Most rules compare the newest steps with the first ones."""

from collections.abc import Callable

from dapo.inspect.charts import AT_LIMIT
from dapo.inspect.figures import REWARD_STEPS, Figures, Finding
from dapo.store.reader import PHASES

MIN_PAIRS = 100  # of answers, before a reward function is judged

ENTROPY_LEFT = 0.5  # of the entropy at the beginning
TRUNCATED, TRUNCATED_MORE = 0.05, 0.03  # share of the answers, and by how much it has risen
WRONG_ORDER = 0.2  # share of pairs that a reward function orders against the accuracy
DROPPED = 0.5  # share of the groups
UNSCORED = 0.01  # share of the answers
PARITY_OF_LIMIT, PARITY_GROWTH = 0.5, 3.0  # share of the bound; times the beginning, from a tenth of the bound on
IDLE = 0.3  # share of a step


def findings(run: Figures) -> list[Finding]:
    return [found for rule in RULES if (found := rule(run)) is not None]


def _entropy(run: Figures) -> Finding | None:
    ends, accuracy = run.ends("actor/entropy"), run.ends("rollout/accuracy")
    if ends is None or ends.last >= ENTROPY_LEFT * ends.first:
        return None
    meanwhile = f"; accuracy meanwhile {accuracy.first:.3f} to {accuracy.last:.3f}" if accuracy else ""
    return Finding(
        rule="entropy falls",
        what=f"entropy fell from {ends.first:.3g} nats ({ends.first_steps}) to {ends.last:.3g} ({ends.last_steps}), "
        f"{1 - ends.last / ends.first:.0%} less{meanwhile}",
        changes=run.changes(
            ("algorithm.clip_ratio_high", "raise it, so that unlikely tokens have room to grow"),
            ("algorithm.entropy_coeff", "above 0 it rewards entropy"),
            ("rollout.temperature", "1 or higher"),
        ),
    )


def _truncation(run: Figures) -> Finding | None:
    ends = run.ends("rollout/truncated")
    if ends is None or ends.last < TRUNCATED or ends.last < ends.first + TRUNCATED_MORE:
        return None
    return Finding(
        rule="truncation rises",
        what=f"{ends.last:.1%} of the answers run into the cap ({ends.last_steps}), {ends.first:.1%} at first "
        f"({ends.first_steps})",
        changes=run.changes(
            ("data.max_response_length", "raise it, if longer answers are meant to be"),
            ("reward.overlong_buffer.enable", "true: length is penalized before the cap", True),
            ("reward.overlong_buffer.len", "more tokens, so that the penalty begins earlier"),
            ("reward.overlong_filtering.enable", "true: truncated answers leave the loss", True),
        ),
    )


def _rewards(run: Figures) -> Finding | None:
    one = next((one for one in run.rewards if one.pairs >= MIN_PAIRS and one.wrong > WRONG_ORDER * one.pairs), None)
    if one is None:
        return None
    return Finding(
        rule="a reward function disagrees",
        what=f"`{one.name}` gives the worse answer more in {one.wrong / one.pairs:.0%} of {one.pairs} pairs of answers "
        f"to one prompt, as much in {one.even / one.pairs:.0%}; mean of right answers {one.mean(True):.3g}, of wrong "
        f"ones {one.mean(False):.3g}; draw {one.worst_draw} shows it (newest {REWARD_STEPS} steps)",
        changes=run.changes(("reward.functions", f"lower the weight of `{one.name}`, or correct it")),
        draws=() if one.worst_draw is None else (one.worst_draw,),
    )


DROPS = {  # outcome: in words, and what helps
    "all_correct": ("all correct", ("data.train_files", "leave out prompts that are always solved, add harder ones")),
    "all_wrong": ("all wrong", ("rollout.n", "more answers find a right one; or easier prompts")),
    "unscorable": ("unscorable", ("reward.limits.wall_s", "see why verdicts fail: `dapo.inspect RUN unscorable`")),
    "overlong": ("overlong", ("data.max_response_length", "raise it, so that fewer answers are filtered as truncated")),
}


def _dropped(run: Figures) -> Finding | None:
    ends, drawn = run.ends("buffer/drawn"), run.last("buffer/drawn")
    if ends is None or not drawn:
        return None
    shares = {name: run.last(f"buffer/{name}") / drawn for name in DROPS}
    filtered = run.value("filter_groups.enable") is not False
    if filtered:  # what is left over: the only reason that is no outcome of a group's accuracies
        shares["overlong"] = max(0.0, 1.0 - run.last("buffer/trained") / drawn - sum(shares.values()))
    if sum(shares.values()) <= DROPPED:
        return None
    parts = ", ".join(f"{share:.0%} {DROPS[name][0]}" for name, share in shares.items() if share >= 0.005)
    most = max(shares, key=lambda name: shares[name])
    verb = "are dropped" if filtered else "are of one accuracy"
    return Finding(
        rule="many groups teach nothing",
        what=f"{sum(shares.values()):.0%} of {drawn:.0f} groups a step {verb} ({parts}; {ends.last_steps})",
        changes=run.changes(
            DROPS[most][1],
            ("filter_groups.max_staleness", "above 0 surplus groups are kept for the next step")
            if filtered
            else ("filter_groups.enable", "true: they are dropped, and others drawn"),
        ),
    )


def _unscored(run: Figures) -> Finding | None:
    drawn = run.metrics.get("buffer/drawn", {})
    groups = sum(drawn.values()) or 1.0
    shares = {
        name.removeprefix("reward/failed_"): sum(drawn.get(step, 0.0) * value for step, value in values.items())
        / groups
        for name, values in run.metrics.items()
        if name.startswith("reward/failed_") and name not in AT_LIMIT
    }
    if sum(shares.values()) <= UNSCORED:
        return None
    parts = ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda each: -each[1]))
    return Finding(
        rule="verdicts are missing",
        what=f"{sum(shares.values()):.1%} of all answers have no verdict: {parts}",
        changes=run.changes(
            ("reward.limits.wall_s", "longer, where it is timeouts"), ("reward.num_workers", "more, where they wait")
        ),
    )


def _parity(run: Figures) -> Finding | None:
    own = "parity/staleness_0/mean_abs_logprob_diff"  # where some tokens are stale, the bound is on the others
    ends = run.ends(own if own in run.metrics else "parity/mean_abs_logprob_diff")
    limit = run.value("weight_sync.max_mean_logprob_diff")
    if ends is None or not limit:
        return None
    grown = ends.last > PARITY_GROWTH * ends.first and ends.last > 0.1 * limit
    if ends.last <= PARITY_OF_LIMIT * limit and not grown:
        return None
    return Finding(
        rule="actors and engines drift apart",
        what=f"mean |difference of log-probabilities| is {ends.last:.2g} nats ({ends.last_steps}), {ends.first:.2g} at "
        f"first; above {limit:g} batches are set aside",
        changes=run.changes(
            ("algorithm.rollout_correction.mode", "truncate: tokens weigh by the ratio of the policies", "truncate"),
            ("model.dtype", "float32 differs least", "float32"),
            ("weight_sync.max_mean_logprob_diff", "raise it only if the difference is understood"),
        ),
    )


def _idle(run: Figures) -> Finding | None:
    ends, step = run.ends("perf/engine/idle"), run.last("perf/step_s")
    if ends is None or ends.last <= IDLE:
        return None
    idle = ends.last
    others = {name: run.last(f"perf/{name}_s") for name in PHASES if name not in ("generation", "reward")}
    seconds = ", ".join(f"{name} {value:.3g} s" for name, value in others.items() if value > 0.05 * idle * step)
    return Finding(
        rule="engines are idle",
        what=f"engines have no request in {idle:.0%} of a step of {step:.3g} s ({ends.last_steps}); {seconds}",
        changes=run.changes(
            ("trainer.colocate", "none: engines and actors work at once, on GPUs of their own")
            if run.value("trainer.colocate") == "time"
            else ("filter_groups.max_staleness", "1 or more: the engines generate while the actors update"),
            ("actor.num_workers", "more ranks shorten the update"),
            ("rollout.num_engines", "fewer engines, their GPUs to the actors"),
        ),
    )


def _held_out(run: Figures) -> Finding | None:
    for name in sorted(name for name in run.metrics if name.endswith("accuracy")):
        values, low, high = (run.metrics.get(f"{name}{end}", {}) for end in ("", "_low", "_high"))
        steps = sorted(set(values) & set(low) & set(high))
        if not steps:
            continue
        best, newest = max(steps, key=lambda step: values[step]), steps[-1]
        if high[newest] < low[best]:
            return Finding(
                rule="held-out accuracy falls",
                what=f"`{name}` is {values[newest]:.3f} ({low[newest]:.3f} to {high[newest]:.3f}) at step {newest}, "
                f"and was {values[best]:.3f} ({low[best]:.3f} to {high[best]:.3f}) at step {best}",
                changes=run.changes(
                    ("checkpoint.resume", f"go back to a checkpoint near step {best}"),
                    ("actor.optim.lr", "lower it from there"),
                ),
            )
    return None


def _skipped(run: Figures) -> Finding | None:
    skipped = {step: value for step, value in run.metrics.get("actor/skipped_steps", {}).items() if value}
    if not skipped:
        return None
    return Finding(
        rule="optimizer steps are skipped",
        what=f"{sum(skipped.values()):.0f} optimizer steps were not taken, because a number was not finite; the newest "
        f"at step {max(skipped)}",
        changes=run.changes(
            ("actor.optim.lr", "lower it"),
            ("actor.optim.lr_warmup_steps", "more of them"),
        ),
    )


RULES: tuple[Callable[[Figures], Finding | None], ...] = (
    *(_skipped, _held_out, _entropy, _truncation, _rewards, _dropped, _unscored, _parity, _idle),
)
