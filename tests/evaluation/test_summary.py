"""What is said of scored answers: per set and source, with and without verdicts, as metrics, JSON and text."""

import json
import math
from dataclasses import replace

import pytest

from dapo.evaluation.held_out import Answered
from dapo.evaluation.summary import document, metrics, summaries, text
from tests.support.fakes import make_group, make_prompt

NAN = math.nan


def answering(number: int, accuracies, predictions=None, source: str = "test"):
    group = make_group(number, accuracies)
    scores = group.scores
    if predictions is not None:
        scores = tuple(replace(score, prediction=given) for score, given in zip(scores, predictions, strict=True))
    return replace(group, draw=replace(group.draw, prompt=make_prompt(number, source)), scores=scores)


def values(*groups, **sets) -> dict[str, float]:
    answered = Answered(version=3, sets={"": groups} if groups else {name: tuple(each) for name, each in sets.items()})
    return metrics(summaries(answered))


def test_accuracy_is_the_mean_over_problems_of_the_mean_over_scored_samples():
    found = values(answering(0, [1.0, 1.0]), answering(1, [0.0, NAN]))
    assert found["eval/accuracy"] == 0.5 and found["eval/samples"] == 4 and found["eval/unscored"] == 0.25
    assert found["eval/pass@2"] == 1.0, "of the one problem with two verdicts"
    assert (found["eval/accuracy_low"], found["eval/accuracy_high"]) == (0.0, 1.0)
    assert "eval/test/accuracy" not in found and "eval/maj@2" not in found, "one source, and nothing was read"


def test_estimates_of_several_sizes_and_an_interval_for_all_samples():
    groups = [answering(n, [1.0, 0.0, 0.0, 0.0], ["7", "8", "8", "9"]) for n in range(3)]
    found = values(*groups)
    assert found["eval/pass@2"] == pytest.approx(0.5) and found["eval/pass@4"] == 1.0
    assert found["eval/maj@4"] == 0.0 and found["eval/maj@2"] == pytest.approx((3 * 0.5) / 6)
    assert {name for name in found if "_low" in name} == {
        f"eval/{name}_low" for name in ("accuracy", "pass@4", "maj@4", "best@4")
    }


def test_problems_with_more_samples_than_others_count_with_all_of_them():
    [found] = summaries(Answered(version=0, sets={"": (answering(0, [1.0, 0.0, 0.0]), answering(1, [1.0, 1.0]))}))
    assert (found.samples, found.answers) == (2, 5) and found.average.value == pytest.approx((1 / 3 + 1) / 2)
    assert found.estimates["pass@2"].value == pytest.approx((2 / 3 + 1) / 2)


def test_sets_with_names_count_alike_in_the_whole_and_sources_apart():
    small = [answering(0, [1.0])]
    large = [answering(1, [1.0], source="one"), *(answering(n, [0.0], source="two") for n in (2, 3))]
    found = values(aime=small, gsm8k=large)
    assert found["eval/accuracy"] == pytest.approx((1 + 1 / 3) / 2) and found["eval/samples"] == 4
    assert (found["eval/aime/accuracy"], found["eval/gsm8k/accuracy"]) == (1.0, pytest.approx(1 / 3))
    assert (found["eval/gsm8k/one/accuracy"], found["eval/gsm8k/two/accuracy"]) == (1.0, 0.0)
    assert "eval/truncated" not in found and found["eval/gsm8k/truncated"] == 0.0


def test_a_set_without_a_verdict_is_no_number_and_no_error():
    found = values(answering(0, [NAN, NAN]))
    assert math.isnan(found["eval/accuracy"]) and found["eval/unscored"] == 1.0
    answered = Answered(version=0, sets={"": (answering(0, [NAN, NAN]),)})
    json.dumps(document(answered, summaries(answered)), allow_nan=False)


def test_the_document_holds_the_verdict_on_every_answer():
    answered = Answered(version=5, sets={"aime": (answering(4, [1.0, 0.0, NAN], ["7", "8", ""]),)})
    found = document(answered, summaries(answered))
    [problem], [summary] = found["problems"], found["summaries"]
    assert found["version"] == 5 and (problem["set"], problem["id"], problem["ground_truth"]) == ("aime", 4, "4")
    assert problem["accuracy"] == [1.0, 0.0, None] and problem["answer"] == ["7", "8", ""]
    assert problem["tokens"] == [4, 5, 6] and problem["truncated"] == [False] * 3
    assert summary["name"] == "aime" and summary["estimates"]["avg@3"]["value"] == 0.5


def test_the_text_has_every_estimate_with_its_interval():
    groups = [answering(n, [1.0, 0.0], ["1", "2"], source) for n, source in enumerate(["a", "b"])]
    shown = text(summaries(Answered(version=0, sets={"mine": tuple(groups)})))
    assert "mine: 2 problems x 2 samples, avg@2 0.500 (0.500 to 0.500)" in shown and "mine · a: 1 problems" in shown
    assert "| 2 | 1.000 (1.000 to 1.000) | 0.500 (0.500 to 0.500) | 1.000" in shown
