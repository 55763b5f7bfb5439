"""Explains a run in words: why a group was dropped, and rules that report problems in figures with the keys to change.
Most rules compare the newest steps with the first ones (a fifth of the run each). An error spoils the run, a warning
wastes a part of it, a note is worth knowing."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dapo.algorithm.fate import DROPPED, Fate
from dapo.report.store.reader import PHASES, Reader

Row = Mapping[str, Any]

MIN_STEPS = 10  # fewer show no trend
WINDOW = (3, 20)  # steps at each end, at least and at most
METRICS = (
    *("actor/entropy", "actor/skipped_steps", "rollout/accuracy", "rollout/truncated", "buffer/*", "reward/failed_*"),
    *("parity/*mean_abs_logprob_diff", "mismatch/*mean", "perf/*_s", "perf/engine/idle", "eval/*accuracy*"),
)
AT_LIMIT = ("reward/failed_cpu", "reward/failed_memory")  # verdicts: the answer is wrong

ENTROPY_LEFT = 0.5  # of the entropy at the beginning
TRUNCATED, TRUNCATED_MORE = 0.05, 0.03  # share of the answers, and by how much it has risen
MOST = 0.5  # share of the groups that are dropped
UNSCORED = 0.01  # share of the answers
UNSCORED_MANY = 0.1  # an error
MISMATCH_OF_LIMIT = 0.2
PARITY_OF_LIMIT, PARITY_GROWTH = 0.5, 3.0  # share of the bound; times the beginning, from a tenth of the bound on
IDLE = 0.3  # share of a step
COSTLY = 0.6  # share of a step that is lost; below it, the loss is a note
KEPT = 0.9  # of the best accuracy: what is below has fallen
ERROR, WARNING, NOTE = SEVERITIES = ("error", "warning", "note")


def why(group: Row) -> str:
    """Returns what became of a group, with the figures that explain it."""
    n, scorable = group["responses"], group["scorable"]
    fate = next((fate for fate in Fate if fate == group["fate"]), None)
    if fate is None:
        return str(group["fate"])
    without = f" of {n}" if scorable == n else f" of {scorable} that could be scored"
    right = "" if group["accuracy"] is None else f"{group['accuracy'] * scorable:.4g} right{without}"
    detail = fate.detail.format(right=right, missing=n - scorable, truncated=group["truncated"], responses=n)
    return f"{'trained on' if fate is Fate.TRAINED else f'dropped, {fate.words}'}: {detail}"


class Change(NamedTuple):
    """A key that may resolve a finding. value: its value in this run; None: not known. how: in words."""

    key: str
    value: Any
    how: str

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return f"`{self.key}`{'' if self.value is None or len(value) > 40 else f' ({value})'}: {self.how}"


class Finding(NamedTuple):
    """What a rule found, in words with figures. changes: the most likely remedy first. severity: of `SEVERITIES`."""

    rule: str
    what: str
    changes: tuple[Change, ...]
    severity: str = WARNING


class Ends(NamedTuple):
    """Means of a metric over the first and over the newest steps of a run, and which steps these are. best: the
    greatest mean over as many steps."""

    first: float
    last: float
    first_steps: str
    last_steps: str
    best: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Input of the rules. metrics: by name and step. config: nested."""

    metrics: Mapping[str, Mapping[int, float]]
    config: Mapping[str, Any]

    def ends(self, name: str) -> Ends | None:
        """Returns the first and newest means of a metric; None if it has too few steps."""
        values = self.metrics.get(name, {})
        steps = sorted(values)
        if len(steps) < MIN_STEPS:
            return None
        size = max(WINDOW[0], min(WINDOW[1], len(steps) // 5))
        parts = [steps[:size], *(steps[end - size : end] for end in range(len(steps), size - 1, -size))]
        means = [statistics.fmean(values[step] for step in part) for part in parts]
        first, last = (f"steps {part[0]} to {part[-1]}" for part in parts[:2])
        return Ends(means[0], means[1], first, last, max(means))

    def last(self, name: str) -> float:
        """Returns the mean over the newest steps; 0 if there are too few."""
        ends = self.ends(name)
        return 0.0 if ends is None else ends.last

    def value(self, key: str) -> Any:
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def changes(self, *given: tuple[str, str] | tuple[str, str, Any]) -> tuple[Change, ...]:
        """Returns each (key, how) with its value in this run; skips (key, how, best value) if the value is the best."""
        pairs = [(self.value(key), key, how, best) for key, how, *best in given]
        return tuple(Change(key, value, how) for value, key, how, best in pairs if [value] != best)


def figures(store: Reader) -> Figures:
    starts = store.starts()
    return Figures(metrics=store.metrics(*METRICS), config=starts[-1]["config"] if starts else {})


def findings(run: Figures) -> list[Finding]:
    """Returns what the rules find, errors first."""
    found = [found for rule in RULES if (found := rule(run)) is not None]
    return sorted(found, key=lambda one: SEVERITIES.index(one.severity))


def verdict(run: Figures, found: Sequence[Finding]) -> tuple[str, str]:
    """Returns the worst severity, "well" where it is no error or warning, or "early", and a line that says it."""
    steps = max(map(len, run.metrics.values()), default=0)
    counts = {name: sum(one.severity == name for one in found) for name in SEVERITIES}
    said = ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
    if counts[ERROR] or counts[WARNING]:
        return ERROR if counts[ERROR] else WARNING, said
    if steps < MIN_STEPS:
        return "early", f"too early to judge: most rules need {MIN_STEPS} steps"
    return "well", f"all is well: {len(RULES)} rules found no error and no warning in {steps} steps"


def _skipped(run: Figures) -> Finding | None:
    skipped = {step: value for step, value in run.metrics.get("actor/skipped_steps", {}).items() if value}
    if not skipped:
        return None
    steps = sorted(run.metrics["actor/skipped_steps"])
    return Finding(
        "optimizer steps are skipped",
        f"{sum(skipped.values()):.0f} optimizer steps were not taken, because a number was not finite; the newest at "
        f"step {max(skipped)}",
        run.changes(("actor.optim.lr", "lower it"), ("actor.optim.lr_warmup_steps", "more of them")),
        ERROR if max(skipped) in steps[-WINDOW[1] :] else WARNING,
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
                "held-out accuracy falls",
                f"`{name}` is {values[newest]:.3f} ({low[newest]:.3f} to {high[newest]:.3f}) at step {newest}, and was "
                f"{values[best]:.3f} ({low[best]:.3f} to {high[best]:.3f}) at step {best}",
                run.changes(
                    ("checkpoint.resume", f"go back to a checkpoint near step {best}"),
                    ("actor.optim.lr", "lower it from there"),
                ),
                ERROR,
            )
    return None


def _entropy(run: Figures) -> Finding | None:
    ends, accuracy = run.ends("actor/entropy"), run.ends("rollout/accuracy")
    if ends is None or ends.last >= ENTROPY_LEFT * ends.first:
        return None
    what = (
        f"entropy fell from {ends.first:.3g} nats ({ends.first_steps}) to {ends.last:.3g} ({ends.last_steps}), "
        f"{1 - ends.last / ends.first:.0%} less"
    )
    if accuracy:
        what += f"; accuracy meanwhile {accuracy.first:.3f} to {accuracy.last:.3f}"
        if accuracy.last > accuracy.first and accuracy.last >= KEPT * accuracy.best:
            return Finding("entropy falls", f"{what}: the policy grows sure while it learns", (), NOTE)
    return Finding(
        "entropy falls",
        what,
        run.changes(
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
        "truncation rises",
        f"{ends.last:.1%} of the answers run into the cap ({ends.last_steps}), {ends.first:.1%} at first "
        f"({ends.first_steps})",
        run.changes(
            ("data.max_response_length", "raise it, if longer answers are meant to be"),
            ("reward.overlong_buffer.enable", "true: length is penalized before the cap", True),
            ("reward.overlong_buffer.len", "more tokens, so that the penalty begins earlier"),
            ("reward.overlong_filtering.enable", "true: truncated answers leave the loss", True),
        ),
    )


def _dropped(run: Figures) -> Finding | None:
    ends, drawn = run.ends("buffer/drawn"), run.last("buffer/drawn")
    if ends is None or not drawn:
        return None
    shares = {fate: run.last(f"buffer/{fate}") / drawn for fate in DROPPED}
    filtered = run.value("filter_groups.enable") is not False
    if filtered:  # what is left over: the only reason that is no outcome of a group's accuracies
        shares[Fate.OVERLONG] = max(0.0, 1.0 - run.last("buffer/trained") / drawn - sum(shares.values()))
    if sum(shares.values()) <= MOST:
        return None
    parts = ", ".join(f"{share:.0%} {fate.words}" for fate, share in shares.items() if share >= 0.005)
    most = max(shares, key=lambda fate: shares[fate])
    step = run.last("perf/step_s")
    lost = sum(shares.values()) * (run.last("perf/generation_s") / step if step else 1.0)
    return Finding(
        "many groups teach nothing",
        f"{sum(shares.values()):.0%} of {drawn:.0f} groups a step are {'dropped' if filtered else 'of one accuracy'} "
        f"({parts}; {ends.last_steps})",
        run.changes(
            (most.key, most.remedy),
            ("filter_groups.max_staleness", "above 0 surplus groups are kept for the next step")
            if filtered
            else ("filter_groups.enable", "true: they are dropped, and others drawn"),
        ),
        NOTE if most is Fate.ALL_CORRECT and lost <= COSTLY else WARNING,  # the prompts are learned
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
        "verdicts are missing",
        f"{sum(shares.values()):.1%} of all answers have no verdict: {parts}",
        run.changes(
            ("reward.limits.wall_s", "longer, where it is timeouts"), ("reward.num_workers", "more, where they wait")
        ),
        ERROR if sum(shares.values()) > UNSCORED_MANY else WARNING,
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
        "actors and engines drift apart",
        f"mean |difference of log-probabilities| is {ends.last:.2g} nats ({ends.last_steps}), {ends.first:.2g} at "
        f"first; above {limit:g} batches are set aside",
        run.changes(
            ("algorithm.rollout_correction.mode", "truncate: tokens weigh by the ratio of the policies", "truncate"),
            ("model.dtype", "float32 differs least", "float32"),
            ("weight_sync.max_mean_logprob_diff", "raise it only if the difference is understood"),
        ),
        ERROR if ends.last > limit else WARNING,
    )


# What lowers a cause of the difference between actors and engines.
_SWITCHES: Mapping[str, tuple[tuple[str, str] | tuple[str, str, Any], ...]] = {
    "temperature": (("rollout.vllm", "an engine argument changes the temperature that requests ask for"),),
    "support": (("rollout.vllm", "an engine argument leaves out tokens; use `rollout.top_p` and `rollout.top_k`"),),
    "head": (("model.head_dtype", "float32: both keep the sums of the head's product", "float32"),),
    "staleness": (
        ("algorithm.rollout_correction.mode", "truncate: tokens weigh by the ratio of the policies", "truncate"),
        ("algorithm.score_centering", "128, say: takes the drift out of the gradient"),
        ("filter_groups.max_staleness", "lower it"),
    ),
    "kernels": (
        ("model.dtype", "float32 differs least", "float32"),
        ("rollout.replay_experts", "true, if the model is a mixture of experts", True),
        ("algorithm.score_centering", "128, say: takes the drift out of the gradient"),
    ),
}


def _mismatch(run: Figures) -> Finding | None:
    newest = {name: values[max(values)] for name, values in run.metrics.items() if values}
    parts = {cause: newest.get(f"mismatch/{cause}_mean", 0.0) for cause in _SWITCHES}
    whole = newest.get("mismatch/mean", 0.0) + parts["staleness"]
    limit = run.value("weight_sync.max_mean_logprob_diff")
    if not limit or whole <= MISMATCH_OF_LIMIT * limit:
        return None
    cause = max(parts, key=lambda each: parts[each])
    return Finding(
        f"most of what actors and engines differ by is {cause}",
        f"{parts[cause]:.2g} of {whole:.2g} nats, mean |difference of log-probabilities| (metrics `mismatch/`)",
        run.changes(*_SWITCHES[cause]),
        WARNING if whole > PARITY_OF_LIMIT * limit else NOTE,
    )


def _idle(run: Figures) -> Finding | None:
    ends, step = run.ends("perf/engine/idle"), run.last("perf/step_s")
    if ends is None or ends.last <= IDLE:
        return None
    others = {name: run.last(f"perf/{name}_s") for name in PHASES if name not in ("generation", "reward")}
    seconds = ", ".join(f"{name} {value:.3g} s" for name, value in others.items() if value > 0.05 * ends.last * step)
    return Finding(
        "engines are idle",
        f"engines have no request in {ends.last:.0%} of a step of {step:.3g} s ({ends.last_steps}); {seconds}",
        run.changes(
            ("trainer.colocate", "none: engines and actors work at once, on GPUs of their own")
            if run.value("trainer.colocate") == "time"
            else ("filter_groups.max_staleness", "1 or more: the engines generate while the actors update"),
            ("actor.num_workers", "more ranks shorten the update"),
            ("rollout.num_engines", "fewer engines, their GPUs to the actors"),
        ),
        WARNING if ends.last > COSTLY else NOTE,
    )


RULES: tuple[Callable[[Figures], Finding | None], ...] = (
    *(_skipped, _held_out, _entropy, _truncation, _dropped, _unscored, _parity, _mismatch, _idle),
)
