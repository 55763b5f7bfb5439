"""Summarizes an evaluation as metrics of a run, as JSON, and as tables. Estimates are made per held-out set, and per
data source if a set has several. Unscorable samples are left out and counted; a problem with fewer than k scored
samples has no estimate @k."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dapo.evaluation.estimates import Estimate, best_at, majority_at, over_problems, pass_at, sizes
from dapo.evaluation.held_out import Answered
from dapo.ground.table import table
from dapo.types import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Results of one held-out set, or of one data source in it. Made by `summarize`. source: "" for the whole set.
    samples: fewest answers of a problem. answers: of all problems. estimates: by published name, such as pass@8.
    response_length_mean: tokens. truncated, unscored: fractions of the answers. turns_mean: per answer."""

    name: str
    source: str
    problems: int
    samples: int
    answers: int
    estimates: dict[str, Estimate]
    response_length_mean: float
    truncated: float
    turns_mean: float
    unscored: float

    @property
    def average(self) -> Estimate:
        return self.estimates[f"avg@{self.samples}"]


def summarize(groups: Sequence[Group], name: str = "", source: str = "") -> Summary:
    samples = min(len(group.responses) for group in groups)
    responses = [response for group in groups for response in group.responses]
    scores = [score for group in groups for score in group.scores]
    scored = [[score for score in group.scores if not math.isnan(score.accuracy)] for group in groups]
    accuracies = [[score.accuracy for score in each] for each in scored]
    answers = [[score.prediction for score in each] for each in scored]
    values = {f"avg@{samples}": [float(np.mean(each)) if each else math.nan for each in accuracies]}
    for k in sizes(samples):
        values[f"pass@{k}"] = [pass_at(each, k) for each in accuracies]
        values[f"best@{k}"] = [best_at(each, k) for each in accuracies]
        if any(map(any, answers)):  # reward functions need not report predictions
            values[f"maj@{k}"] = [majority_at(*each, k) for each in zip(accuracies, answers, strict=True)]
    return Summary(
        name=name,
        source=source,
        problems=len(groups),
        samples=samples,
        answers=len(responses),
        estimates=over_problems(values),
        response_length_mean=float(np.mean([response.num_sampled for response in responses])),
        truncated=float(np.mean([response.truncated for response in responses])),
        turns_mean=float(np.mean([response.num_turns for response in responses])),
        unscored=float(np.mean([math.isnan(score.accuracy) for score in scores])),
    )


def summaries(answered: Answered) -> list[Summary]:
    found = []
    for name, groups in answered.sets.items():
        by_source: dict[str, list[Group]] = {}
        for group in groups:
            by_source.setdefault(group.draw.prompt.source, []).append(group)
        found.append(summarize(groups, name))
        if len(by_source) > 1:
            found += [summarize(those, name, source) for source, those in by_source.items()]
    return found


def metrics(found: Sequence[Summary]) -> dict[str, float]:
    """Returns the `eval/` metrics; those of a named set contain its name. `eval/accuracy`: plain mean over sets."""
    wholes = [summary for summary in found if not summary.source]
    values = {
        "eval/accuracy": float(np.mean([summary.average.value for summary in wholes])),
        "eval/samples": float(sum(summary.answers for summary in wholes)),
    }
    for summary in found:
        where = "/".join(part for part in ("eval", summary.name, summary.source) if part)
        values |= {f"{where}/{name}": value for name, value in _flat(summary)}
    return values


def _flat(summary: Summary) -> Iterator[tuple[str, float]]:
    for name, estimate in summary.estimates.items():
        kind, _, k = name.partition("@")
        metric = "accuracy" if kind == "avg" else name
        yield metric, estimate.value
        if int(k) == summary.samples:
            yield f"{metric}_low", estimate.low
            yield f"{metric}_high", estimate.high
    yield "response_length_mean", summary.response_length_mean
    yield "truncated", summary.truncated
    yield "turns_mean", summary.turns_mean
    yield "unscored", summary.unscored
    yield "samples", float(summary.answers)


def document(answered: Answered, found: Sequence[Summary]) -> dict[str, Any]:
    """Returns the content of the JSON file, with null for NaN: the summaries, and the samples of each problem."""
    problems = [
        {
            "set": name,
            "id": group.draw.prompt.id,
            "source": group.draw.prompt.source,
            "ground_truth": group.draw.prompt.ground_truth,
            "accuracy": [score.accuracy for score in group.scores],
            "answer": [score.prediction for score in group.scores],
            "failure": [score.failure for score in group.scores],
            "tokens": list(group.lengths),
            "truncated": [response.truncated for response in group.responses],
        }
        for name, groups in answered.sets.items()
        for group in groups
    ]
    both = {"version": answered.version, "summaries": [asdict(summary) for summary in found], "problems": problems}
    return {name: _without_nan(value) for name, value in both.items()}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def text(found: Sequence[Summary]) -> str:
    return "\n\n".join(map(_text, found))


def _text(summary: Summary) -> str:
    named = " · ".join(part for part in (summary.name or "held-out", summary.source) if part)
    head = (
        f"{named}: {summary.problems} problems x {summary.samples} samples, "
        f"avg@{summary.samples} {_shown(summary.average)}, mean length {summary.response_length_mean:.0f} tokens, "
        f"{summary.truncated:.1%} truncated, {summary.unscored:.1%} without a verdict"
    )
    kinds = [kind for kind in ("pass", "maj", "best") if f"{kind}@{summary.samples}" in summary.estimates]
    if not kinds or summary.samples == 1:
        return head
    rows = [[str(k), *(_shown(summary.estimates[f"{kind}@{k}"]) for kind in kinds)] for k in sizes(summary.samples)]
    return f"{head}\n{table(['k', *(f'{kind}@k' for kind in kinds)], rows)}"


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
