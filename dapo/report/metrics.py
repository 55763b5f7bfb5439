"""Computes the metrics of a step: of the sampled groups, the update, and the time. `perf/` and `ledger/` depend on
timing; at staleness 0 everything else is a function of the seed alone."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from dapo.algorithm.fate import TRAINED
from dapo.algorithm.outcome import MIXED, OUTCOMES
from dapo.report.log import MetricsLogger
from dapo.types import Collected, Cut, Group, TrainBatch, TrainSequence

MAX_SAMPLE_CHARS = 2000
RANKS_WORK = ("reference", "update", "sync")  # phases, one after the other


def step_metrics(
    collected: Collected,
    batch: TrainBatch,
    update: dict[str, float],
    seconds: dict[str, float],
    totals: dict[str, float],
    *,
    gpus: int = 0,
) -> dict[str, float]:
    """Returns all metrics of one step. update: from actors, prompt order and pools. totals: of the buffer. gpus: in
    all."""
    trained = sum(group.num_tokens for group in collected.groups)
    drawn = sum(group.num_tokens for group in collected.drawn)
    generated = drawn + collected.lost_tokens
    outcomes = Counter(collected.outcomes)
    counts = {
        "buffer/drawn": len(collected.drawn),
        "buffer/trained": len(collected.groups),
        **{f"buffer/{name}": outcomes[name] for name in OUTCOMES},
        "buffer/length_ks": length_distance(collected.groups, collected.drawn),
        "buffer/trained_tokens": trained,
        "buffer/dropped_tokens": drawn - trained,
    }
    step_s = max(seconds.get("step", 0.0), 1e-9)
    perf = {f"perf/{phase}_s": value for phase, value in seconds.items()}
    perf |= {
        "perf/returned_draws": len(collected.returned),
        "perf/length_ks": length_distance(collected.groups, (*collected.drawn, *collected.lost)),
        "perf/aborted_tokens": collected.lost_tokens,
        "perf/goodput": trained / generated,
        "perf/rank/idle": 1.0 - sum(seconds.get(phase, 0.0) for phase in RANKS_WORK) / step_s,
    }
    if seconds.get("generation"):  # not where batches are read
        perf["perf/generation_tokens_per_s"] = generated / seconds["generation"]
    if "actor/response_tokens" in update:  # not where nothing is trained
        perf["perf/update_tokens_per_s"] = update["actor/response_tokens"] / max(seconds.get("update", 0.0), 1e-9)
    if gpus:
        tokens = sum(len(sequence.token_ids) for minibatch in batch.minibatches for sequence in minibatch)
        perf["perf/tokens_per_s_per_gpu"] = tokens / (step_s * gpus)
    trained_on = _batch_metrics(collected.groups, batch)
    rollout = _rollout_metrics(collected.drawn) | _source_metrics(collected)
    values = {**counts, **rollout, **trained_on, **update, **perf, **totals}
    return {name: float(value) for name, value in values.items()}


def _rollout_metrics(drawn: Sequence[Group]) -> dict[str, float]:
    scores = [score for group in drawn for score in group.scores]
    responses = [response for group in drawn for response in group.responses]
    lengths = np.array([length for group in drawn for length in group.lengths])
    failures = Counter(score.failure for score in scores if score.failure)
    return {
        "rollout/accuracy": _mean_without_nan([score.accuracy for score in scores]),
        "rollout/reward_mean": _mean_without_nan([score.reward for score in scores]),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_min": float(lengths.min()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated": float(np.mean([response.truncated for response in responses])),
        "rollout/turns_mean": float(np.mean([response.num_turns for response in responses])),
        **_means([score.parts | score.metrics for score in scores]),
        **{f"reward/failed_{failure}": count / len(scores) for failure, count in failures.items()},
    }


def _source_metrics(collected: Collected) -> dict[str, float]:
    by_source: dict[str, list[tuple[Group, str, str]]] = {}
    for ended in zip(collected.drawn, collected.fates, collected.outcomes, strict=True):
        if entry := ended[0].draw.prompt.entry:
            by_source.setdefault(entry, []).append(ended)
    found: dict[str, float] = {}
    for name, of_source in sorted(by_source.items()):
        groups = [group for group, _, _ in of_source]
        whole = _rollout_metrics(groups)
        about = ("accuracy", "reward_mean", "response_length_mean")
        found |= {f"source/{name}/{key}": whole[f"rollout/{key}"] for key in about}
        found |= {
            f"source/{name}/drawn": len(groups),
            f"source/{name}/share": len(groups) / len(collected.drawn),
            f"source/{name}/trained": sum(fate == TRAINED for _, fate, _ in of_source),
            f"source/{name}/mixed": float(np.mean([outcome == MIXED for _, _, outcome in of_source])),
            f"source/{name}/tokens": sum(group.num_tokens for group in groups),
        }
    return found


def _means(given: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each reward by name over the responses that have it, without NaN."""
    found: dict[str, list[float]] = {}
    for values in given:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {f"reward/{name}": _mean_without_nan(values) for name, values in sorted(found.items())}


def _mean_without_nan(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def length_distance(trained: Sequence[Group], generated: Sequence[Group | Cut]) -> float:
    """Two-sample Kolmogorov-Smirnov statistic of response lengths, in [0, 1]: the effect of selection on them."""
    one, other = (np.sort([length for group in groups for length in group.lengths]) for groups in (trained, generated))
    at = np.union1d(one, other)
    shares = [np.searchsorted(lengths, at, side="right") / len(lengths) for lengths in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def _batch_metrics(groups: Sequence[Group], batch: TrainBatch) -> dict[str, float]:
    scores = [score for group in groups for score in group.scores]
    sequences = [sequence for minibatch in batch.minibatches for sequence in minibatch]
    tokens = [group.num_tokens for group in groups]
    penalties = [score.parts["kl_penalty"] for score in scores if "kl_penalty" in score.parts]
    without = sum(score.failure == "kl" for score in scores)
    return {
        **_spread("batch/reward", [score.reward for score in scores if not math.isnan(score.reward)]),
        **_spread("batch/advantage", [sequence.advantage for sequence in sequences]),
        "batch/tokens_per_group_mean": float(np.mean(tokens)),
        "batch/tokens_per_group_max": float(np.max(tokens)),
        **_staleness_metrics(groups, sequences),
        "batch/filtered": 1.0 - len(sequences) / len(scores),
        "batch/equal_rewards": sum(_has_equal_rewards(group) for group in groups),
        **({"reward/kl_penalty": float(np.mean(penalties))} if penalties else {}),
        **({"reward/failed_kl": without / len(scores)} if without else {}),
    }


def _has_equal_rewards(group: Group) -> bool:
    """Whether all responses of the group have the same reward, whatever their accuracies."""
    rewards = [score.reward for score in group.scores if not math.isnan(score.reward)]
    return min(rewards, default=0.0) == max(rewards, default=0.0)


def _staleness_metrics(groups: Sequence[Group], sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Returns the staleness (`TrainSequence`) of the trained tokens, and the share of responses that crossed a weight
    update."""
    # Per sequence: one array of 40 million tokens would block the driver for seconds.
    each = [sequence.staleness for sequence in sequences if len(sequence.staleness)]
    tokens = max(1, sum(map(len, each)))
    versions = [
        {span.version for span in one.policy_versions if span.end > span.start}
        for group in groups
        for one in group.responses
    ]
    return {
        "batch/staleness_mean": sum(int(one.sum(dtype=np.int64)) for one in each) / tokens,
        "batch/staleness_max": max((int(one.max()) for one in each), default=0),
        "batch/stale_tokens": sum(int(np.count_nonzero(one)) for one in each) / tokens,
        "batch/crossed_responses": sum(len(one) > 1 for one in versions) / len(versions),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns mean, standard deviation (ddof 0), minimum and maximum; NaN without values."""
    array = np.array(values) if len(values) else np.array([math.nan])
    return {
        f"{name}_mean": float(array.mean()),
        f"{name}_std": float(array.std()),
        f"{name}_min": float(array.min()),
        f"{name}_max": float(array.max()),
    }


def report_step(
    logger: MetricsLogger,
    step: int,
    metrics: dict[str, float],
    collected: Collected,
    *,
    samples: int,
) -> None:
    """Logs metrics and groups of a step, histograms of response lengths and pass rates, and `samples` texts."""
    logger.log(step, metrics)
    logger.groups(step, collected)
    logger.histogram(step, "rollout/lengths", [length for group in collected.drawn for length in group.lengths])
    rates = [float(np.mean(group.accuracies)) for group in collected.drawn if group.accuracies]
    logger.histogram(step, "rollout/pass_rates", rates)
    for index in range(samples):
        logger.text(step, f"sample/{index}", sample_text(collected, index))


def sample_text(collected: Collected, index: int) -> str:
    group = collected.groups[index % len(collected.groups)]
    response, score = group.responses[0], group.scores[0]
    return (
        f"**prompt**\n{_fenced(group.draw.prompt.text)}\n\n**answer**\n{_fenced(response.text)}\n\n"
        f"**accuracy** {score.accuracy:g} · **reward** {score.reward:g} · **truth** {group.draw.prompt.ground_truth}"
        f"{f' · **read as** {score.prediction}' if score.prediction else ''}"
    )


def _fenced(text: str) -> str:
    """Returns the end of a text as a Markdown code block that the text cannot close."""
    return "```\n" + text[-MAX_SAMPLE_CHARS:].replace("```", "'''") + "\n```"
