"""The metrics of a step against a brute-force recomputation, with unscorable and truncated responses."""

import dataclasses
import math
import statistics
from random import Random

import pytest

from dapo.algorithm.batch import build_batch
from dapo.algorithm.outcome import classify
from dapo.config.schema import Config
from dapo.report.metrics import sample_text, step_metrics
from dapo.sampling.buffer import OversamplingBuffer
from dapo.types import Collected, Cut, Group, Score, VersionSpan
from tests.support.fakes import make_group, make_response
from tests.support.report.reference import undocumented

NAN = math.nan
VERSION = 4
UPDATE = {"actor/loss": 0.25, "actor/response_tokens": 321.0, "parity/ess": 0.9}
SECONDS = {"generation": 4.0, "update": 2.0, "sync": 0.5, "step": 7.5, "driver": 0.0}


def some_group(index: int, random: Random, *, penalized: bool) -> Group:
    """Ragged; some responses unscorable (no parts, as the reward pool gives them), some truncated."""
    size = random.randint(2, 6)
    group = make_group(index, [0.0] * size)
    responses, scores = [], []
    for _ in range(size):
        length, switch = random.randint(1, 30), random.randint(0, 30)  # a weight update may fall into the response
        spans = [VersionSpan(version=VERSION - 1, start=0, end=min(switch, length))] * (switch > 0)
        spans += [VersionSpan(version=VERSION, start=switch, end=length)] * (switch < length)
        response = make_response(length, random.choice(["stop", "stop", "length"]))
        responses.append(dataclasses.replace(response, policy_versions=tuple(spans)))
        if random.random() < 0.25:
            scores.append(Score(accuracy=NAN, reward=NAN, parts={}, metrics={}, prediction="", failure=""))
            continue
        accuracy, overlong = float(random.random() < 0.5), -random.random()
        parts = {"math": 2 * accuracy - 1, "overlong": overlong}
        if random.random() < 0.5:
            parts["format"] = random.random()
        reward = sum(parts.values())
        if penalized:
            parts["kl_penalty"] = -random.random()
        scores.append(Score(accuracy=accuracy, reward=reward, parts=parts, metrics={}, prediction="", failure=""))
    return dataclasses.replace(group, responses=tuple(responses), scores=tuple(scores))


def spread(name: str, values: list[float]) -> dict[str, float]:
    values = values or [NAN]
    std = statistics.pstdev(values) if not math.isnan(values[0]) else NAN
    return {
        f"{name}_mean": sum(values) / len(values),
        f"{name}_std": std,
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def ks(left: list[int], right: list[int]) -> float:
    at = sorted({*left, *right})
    return max(abs(sum(x <= y for x in left) / len(left) - sum(x <= y for x in right) / len(right)) for y in at)


def make_buffer() -> OversamplingBuffer:
    buffer = OversamplingBuffer(train_batch_size=4, max_in_flight=8)
    buffer.rate.restore([0.4, 1.0])
    buffer.serving(VERSION)
    buffer.open()
    buffer.take()
    for index, tokens in ((0, 40), (1, 60)):
        buffer.draws.generated(index, tokens)
    buffer.draws.scored(make_group(0, [0.0, 0.0]), "all_wrong", "all_wrong")
    buffer.draws.train([0])
    buffer.trained()
    buffer.aborted(100)
    return buffer


LEDGER = {
    **{"drawn": 8, "draws_in_generation": 6, "draws_in_reward": 1, "draws_buffered": 0, "draws_to_retry": 0},
    **{"draws_trained": 0, "draws_all_correct": 0, "draws_all_wrong": 1, "draws_unscorable": 0, "draws_overlong": 0},
    **{"tokens_generated": 200, "goodput": 0.0, "wasted_surplus": 0.5, "wasted_stale": 0.0, "wasted_stopped": 0.0},
    "wasted_refused": 0.0,
    **{"dropped_all_correct": 0.0, "dropped_all_wrong": 0.2, "dropped_unscorable": 0.0, "dropped_overlong": 0.0},
}


def collected_of(drawn: list[Group], trained: list[Group], **more) -> Collected:
    given = {"fates": ("",) * len(drawn), "outcomes": tuple(map(classify, drawn)), "returned": ()}
    given |= {"why_returned": "", "unfinished": frozenset()}
    return Collected(drawn=tuple(drawn), groups=tuple(trained), **given | more)


def replaced(group: Group, **prompt) -> Group:
    draw = dataclasses.replace(group.draw, prompt=dataclasses.replace(group.draw.prompt, **prompt))
    return dataclasses.replace(group, draw=draw)


def brute_force(
    drawn: list[Group], trained: list[Group], advantages: list[float], lost: list[int], filtering: bool
) -> dict[str, float]:
    kept = [r for group in trained for r in group.responses if not (filtering and r.finish_reason == "length")]
    stale = [VERSION - span.version for r in kept for span in r.policy_versions for _ in range(span.start, span.end)]
    crossed = [len({span.version for span in r.policy_versions}) > 1 for group in trained for r in group.responses]
    lengths, truncated, rewards, accuracies, parts = [], 0, [], [], {}
    for group in drawn:
        for response, score in zip(group.responses, group.scores, strict=True):
            lengths.append(len(response.token_ids))
            truncated += response.finish_reason == "length"
            if score.reward == score.reward:
                rewards.append(score.reward)
                accuracies.append(score.accuracy)
            for name, value in score.parts.items():
                parts.setdefault(name, []).append(value)
    aborted = sum(lost)
    kinds = [classify(group) for group in drawn]
    per_group = [sum(len(response.token_ids) for response in group.responses) for group in trained]
    trained_lengths = [len(response.token_ids) for group in trained for response in group.responses]
    trained_scores = [score for group in trained for score in group.scores]
    expected = {
        "buffer/drawn": len(drawn),
        "buffer/trained": len(trained),
        **{f"buffer/{kind}": kinds.count(kind) for kind in ("mixed", "all_correct", "all_wrong", "unscorable")},
        "buffer/usable_rate": 0.4,
        "buffer/trained_tokens": sum(per_group),
        "buffer/dropped_tokens": sum(lengths) - sum(per_group),
        "rollout/accuracy": sum(accuracies) / len(accuracies) if accuracies else NAN,
        "rollout/reward_mean": sum(rewards) / len(rewards) if rewards else NAN,
        "rollout/response_length_mean": sum(lengths) / len(lengths),
        "rollout/response_length_min": min(lengths),
        "rollout/response_length_max": max(lengths),
        "rollout/truncated": truncated / len(lengths),
        "rollout/turns_mean": 1.0,
        **{f"reward/{name}": sum(values) / len(values) for name, values in parts.items()},
        **spread("batch/reward", [s.reward for s in trained_scores if s.reward == s.reward]),
        **spread("batch/advantage", advantages),
        "batch/tokens_per_group_mean": sum(per_group) / len(per_group),
        "batch/tokens_per_group_max": max(per_group),
        "batch/equal_rewards": sum(
            len({score.reward for score in group.scores if score.reward == score.reward}) < 2 for group in trained
        ),
        "batch/filtered": (len(trained_scores) - len(advantages)) / len(trained_scores),
        **UPDATE,
        **{f"ledger/{name}": value for name, value in LEDGER.items()},
        **{f"perf/{phase}_s": value for phase, value in SECONDS.items()},
        "buffer/length_ks": ks(trained_lengths, lengths),
        "perf/length_ks": ks(trained_lengths, lengths + lost),
        "batch/staleness_mean": sum(stale) / len(stale) if stale else 0.0,
        "batch/staleness_max": max(stale, default=0),
        "batch/stale_tokens": sum(stale) / len(stale) if stale else 0.0,  # all of them are one update old
        "batch/crossed_responses": sum(crossed) / len(crossed),
        "perf/returned_draws": 3,
        "perf/aborted_tokens": aborted,
        "perf/goodput": sum(per_group) / (sum(lengths) + aborted),
        "perf/generation_tokens_per_s": (sum(lengths) + aborted) / 4.0,
        "perf/update_tokens_per_s": 321.0 / 2.0,
        "perf/rank/idle": 1 - 2.5 / 7.5,
    }
    penalties = [s.parts["kl_penalty"] for s in trained_scores if "kl_penalty" in s.parts]
    return expected | ({"reward/kl_penalty": sum(penalties) / len(penalties)} if penalties else {})


@pytest.mark.parametrize("penalized", [False, True])
@pytest.mark.parametrize("filtering", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_metric_equals_brute_force(seed, filtering, penalized):
    random = Random(seed)
    cfg = Config()
    cfg.actor.ppo_mini_batch_size = 2
    cfg.reward.overlong_filtering.enable = filtering
    drawn = [some_group(index, random, penalized=False) for index in range(random.randint(3, 7))]
    trained = drawn[: random.randint(1, 3)]
    if penalized:  # the groups trained on are copies then
        trained = [some_group(group.draw.index, random, penalized=True) for group in trained]
    cut_off = some_group(8, random, penalized=False)
    lost = [len(response.token_ids) for response in cut_off.responses]
    cuts = {"lost": (Cut(lengths=cut_off.lengths),), "lost_tokens": sum(lost)}
    collected = collected_of(drawn, trained, returned=(7, 8, 9), unfinished=frozenset({8}), **cuts)
    batch = build_batch(trained, cfg, version=VERSION)
    advantages = [sequence.advantage for minibatch in batch.minibatches for sequence in minibatch]
    expected = brute_force(drawn, trained, advantages, lost, filtering)
    tokens = sum(len(sequence.token_ids) for minibatch in batch.minibatches for sequence in minibatch)
    expected["perf/tokens_per_s_per_gpu"] = tokens / (7.5 * 3)
    metrics = step_metrics(collected, batch, UPDATE, SECONDS, make_buffer().metrics(), gpus=3)
    assert set(metrics) == set(expected)
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize("unscorable", [False, True])
def test_what_cannot_be_averaged_is_not_a_number(unscorable):
    """Nothing scored, and every response filtered: NaN, no error and no zero that looks like a result."""
    group = make_group(0, [1.0, 0.0])
    responses = tuple(dataclasses.replace(response, finish_reason="length") for response in group.responses)
    scores = tuple(Score(accuracy=NAN, reward=NAN, parts={}, metrics={}, prediction="", failure="") for _ in responses)
    group = dataclasses.replace(group, responses=responses, scores=scores if unscorable else group.scores)
    cfg = Config()
    cfg.reward.overlong_filtering.enable = True
    collected = collected_of([group], [group])
    metrics = step_metrics(collected, build_batch([group], cfg, version=0), UPDATE, {}, make_buffer().metrics())
    assert math.isnan(metrics["rollout/accuracy"]) is unscorable
    assert math.isnan(metrics["batch/reward_mean"]) is unscorable
    assert math.isnan(metrics["batch/advantage_mean"])
    assert metrics["batch/filtered"] == 1.0 and metrics["rollout/truncated"] == 1.0


def test_a_sample_shows_what_was_asked_answered_and_read():
    group = make_group(4, [1.0])
    response = dataclasses.replace(group.responses[0], text="so ``` it is 7" + "!" * 3000)
    score = dataclasses.replace(group.scores[0], prediction="7")
    text = sample_text(collected_of([], [dataclasses.replace(group, responses=(response,), scores=(score,))]), 9)
    assert text.startswith("**prompt**\n```\n4\n```") and text.count("```") == 4 and "!" * 1000 in text
    assert len(text) < 2300 and text.endswith("**accuracy** 1 · **reward** 1 · **truth** 4 · **read as** 7")


def test_each_source_has_metrics_of_its_own_groups():
    random = Random(5)
    names = ["sums", "words"]
    drawn = [some_group(index, random, penalized=False) for index in range(30)]
    drawn = [replaced(group, entry=names[group.draw.index % 3 == 0]) for group in drawn]
    # A filter of the run's own calls others mixed than accuracies do.
    usable = [group for group in drawn if group.draw.index % 4]
    outcomes = tuple("mixed" if group in usable else "all_wrong" for group in drawn)
    fates = tuple("trained" if group in usable else "all_wrong" for group in drawn)
    collected = collected_of(drawn, usable, fates=fates, outcomes=outcomes, why_returned="surplus")
    batch = build_batch(usable, Config(), version=VERSION)
    found = step_metrics(collected, batch, UPDATE, SECONDS, {})
    assert undocumented(found) == []
    for number, name in enumerate(names):
        own = [group for group in drawn if (group.draw.index % 3 == 0) == number]
        accuracies = [accuracy for group in own for accuracy in group.accuracies]
        lengths = [length for group in own for length in group.lengths]
        mixed = sum(group in usable for group in own)
        assert found[f"source/{name}/drawn"] == len(own) and found[f"source/{name}/share"] == len(own) / 30
        assert found[f"source/{name}/trained"] == mixed and found[f"source/{name}/mixed"] == mixed / len(own)
        assert found[f"source/{name}/tokens"] == sum(lengths)
        assert found[f"source/{name}/response_length_mean"] == pytest.approx(statistics.mean(lengths))
        assert found[f"source/{name}/accuracy"] == pytest.approx(statistics.mean(accuracies))
