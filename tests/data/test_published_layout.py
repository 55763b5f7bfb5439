"""DAPO-Math-17k as it is published: rows a hundred times, prompts with several truths; held-out sets."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.data.prompts import DataReport
from dapo.data.sources import held_out_files, load_held_out
from dapo.evaluation.held_out import Evaluation
from dapo.evaluation.summary import metrics, summaries
from dapo.types import HeldOut
from tests.support.fakes import FakeRewards, FakeRollouts
from tests.support.faulty_pools import run
from tests.support.prompts import load_prompts

KEY = "data.train_files"
COPIES = 100  # of each row, one after the other, in the published file


class CountingTokenizer:
    """A token per character, and the number of texts that went through each of its two steps."""

    chat_template = "{{ messages[0].content }}"

    def __init__(self) -> None:
        self.templated = self.tokenized = 0

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        self.templated += 1
        return messages[0]["content"]

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        self.tokenized += len(texts)
        return {"input_ids": [list(map(ord, text)) for text in texts]}


def published(question: str, truth: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Solve the following problem.\n\n{question}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-a1cb-49d1-8c1e-{index:012x}"},
    }


def write(path: Path, rows: list[dict[str, Any]], copies: int = 1) -> str:
    indices = [index for index in range(len(rows)) for _ in range(copies)]
    pq.write_table(pa.Table.from_pylist(rows).take(indices), path)
    return str(path)


def load(name: str, tokenizer: Any, max_contradictory: float = 0.1) -> tuple[list[Any], DataReport]:
    return load_prompts([name], tokenizer, max_prompt_length=2048, max_contradictory=max_contradictory, key=KEY)


def test_the_published_file_is_loaded_and_tokenized_once_per_distinct_prompt(tmp_path):
    rows = [published(f"What is {i} + {i}?", str(2 * i), i) for i in range(100)]
    rows.append(published("What is 7 + 7?", "15", 200))  # another ground truth
    rows.append(published("What is 7 + 7?", "16", 201))  # and a third: still one prompt
    rows.append(published("What is 9 + 9?", "19", 202))
    rows.append(published("What is 17 + 17?", "34.0", 203))  # the same in another spelling
    rows.append(published("What is 18 + 18?", "$36$", 204))
    tokenizer = CountingTokenizer()
    prompts, report = load(write(tmp_path / "train.parquet", rows, COPIES), tokenizer)
    assert report == DataReport(rows=10_500, duplicates=10_400, contradictory=2, too_long=0, kept=98)
    assert [prompt.id for prompt in prompts] == list(range(98))
    truths = {prompt.messages[0][1].split("\n\n")[1]: prompt.ground_truth for prompt in prompts}
    assert truths == {f"What is {i} + {i}?": str(2 * i) for i in range(100) if i not in (7, 9)}
    assert prompts[0].extra_info == {"index": "9a9b6eb4-a1cb-49d1-8c1e-000000000000"}
    assert (tokenizer.templated, tokenizer.tokenized) == (98, 98)


@pytest.mark.parametrize(
    ("one", "other", "contradictory"),
    [
        pytest.param("34", "34.0", 0, id="decimal"),
        pytest.param("1080", "1,080", 0, id="thousands"),
        pytest.param("0.5", "\\frac{1}{2}", 0, id="fraction"),
        pytest.param("x", "$x$", 0, id="formula"),
        pytest.param("34", "35", 1, id="numbers"),
        pytest.param("x", "y", 1, id="letters"),
    ],
)
def test_truths_that_differ_in_spelling_alone_are_one(one, other, contradictory, tmp_path):
    name = write(tmp_path / "a.parquet", [published("q", one, 0), published("q", other, 1), published("p", "1", 2)])
    prompts, report = load(name, CountingTokenizer(), max_contradictory=0.5)
    assert report == DataReport(rows=3, duplicates=1, contradictory=contradictory, too_long=0, kept=2 - contradictory)
    assert prompts[0].ground_truth == (one if not contradictory else "1")


def test_contradictions_are_found_across_files(tmp_path):
    files = [write(tmp_path / f"{truth}.parquet", [published("q", truth, 0), published("p", "1", 1)]) for truth in "45"]
    _, report = load_prompts(files, CountingTokenizer(), max_prompt_length=99, max_contradictory=0.5, key=KEY)
    assert report == DataReport(rows=4, duplicates=2, contradictory=1, too_long=0, kept=1)


def test_too_many_contradictions_are_an_error_with_an_example(tmp_path):
    rows = [published(str(i % 10), str(i % 10 + (i >= 18)), i) for i in range(20)]
    name = write(tmp_path / "a.parquet", rows)
    assert load(name, CountingTokenizer(), max_contradictory=0.2)[1].contradictory == 2
    with pytest.raises(ValueError, match="2 of 10 distinct prompts") as error:
        load(name, CountingTokenizer())
    rows = [f"`{KEY}`: {name}, row {row} (counted from 0) says '{truth}'" for row, truth in ((8, 8), (18, 9))]
    for part in ("`data.max_contradictory` (0.1)", "raise it", *rows):
        assert part in str(error.value)


def config(files: Any, n: int) -> Config:
    cfg = Config()
    cfg.data.val_files, cfg.eval.n = files, n
    return cfg


def held_out(files: Any, n: int) -> list[HeldOut]:
    return load_held_out(config(files, n), CountingTokenizer())


def measured(files: str, n: int) -> dict[str, float]:
    """What an evaluation says of engines whose answers depend on their seeds alone."""
    rewards = FakeRewards(lambda prompt, sample, response: float(int(response.text) % 5 < 1 + prompt.id % 4))
    evaluation = Evaluation(held_out([files], n), FakeRollouts(), rewards, config([files], n), version=0)

    async def whole():
        evaluation.hurry()
        return metrics(summaries(await evaluation.answers()))

    return run(whole())


def test_a_file_that_repeats_its_problems_is_one_row_each_with_as_many_samples(tmp_path):
    """The layout of AIME-2024: each problem in so many rows, in no order."""
    rows = [published(f"What is {i} + {i}?", str(2 * i), i) for i in range(6)] * 8
    random.Random(3).shuffle(rows)
    file = write(tmp_path / "made.parquet", rows)
    first = {row["prompt"][0]["content"]: row for row in reversed(rows)}
    distinct = write(tmp_path / "once.parquet", sorted(first.values(), key=rows.index))
    [repeated], [single] = held_out([file], 1), held_out([distinct], 8)
    assert len(repeated.prompts) == 6 and repeated.samples == single.samples == (8,) * 6
    assert [prompt.messages for prompt in repeated.prompts] == [prompt.messages for prompt in single.prompts]
    whole = measured(file, 1)
    assert whole == measured(file, 8) == measured(distinct, 8)
    assert whole["eval/samples"] == 48 and 0 < whole["eval/accuracy"] < 1
    assert whole != measured(distinct, 4)


def test_n_is_the_least_number_of_samples(tmp_path):
    rows = [published("a", "1", 0)] * 3 + [published("b", "2", 1)]
    [found] = held_out([write(tmp_path / "a.parquet", rows)], 2)
    assert found.samples == (3, 2)
    with pytest.raises(ValueError, match="holds a problem 1001 times"):
        held_out([write(tmp_path / "b.parquet", rows[:1] * 1001)], 2)


def test_sets_have_the_names_and_files_of_the_configuration(tmp_path):
    one, two = (write(tmp_path / f"{name}.parquet", [published(name, "1", 0)]) for name in "ab")
    sets = held_out({"both": [one, two], "second": two}, 1)
    assert [(each.name, [prompt.messages[0][1][-1] for prompt in each.prompts]) for each in sets] == [
        ("both", ["a", "b"]),
        ("second", ["b"]),
    ]
    told: list[tuple[str, int]] = []
    cfg = config({"both": [one, two], "second": two}, 1)
    load_held_out(cfg, CountingTokenizer(), told=lambda key, report: told.append((key, report.kept)))
    assert told == [("data.val_files.both", 2), ("data.val_files.second", 1)]
    with pytest.raises(ValueError, match=r"`data.val_files.gone` \(.*nothing.parquet\) does not exist"):
        held_out({"gone": str(tmp_path / "nothing.parquet")}, 1)
    assert held_out(None, 1) == held_out([], 1) == held_out({}, 1) == []


@pytest.mark.parametrize(
    ("value", "sets"),
    [
        ("[a.parquet,b.jsonl]", {"": ["a.parquet", "b.jsonl"]}),
        ("{aime: a, gsm8k: [b, c]}", {"aime": ["a"], "gsm8k": ["b", "c"]}),
        ("[]", {}),
    ],
)
def test_a_list_or_a_mapping_takes_the_place_of_what_an_experiment_has(value, sets):
    for before in ([], ["{x: y}"], ["{x: y}", value, "[z]"]):
        cfg = compose([f"data.val_files={each}" for each in (*before, value)], "dapo_tiny")
        assert {one.name: one.files for one in held_out_files(cfg.data)} == sets


@pytest.mark.parametrize("value", ["3", "{a: []}", "[[a]]", "{a b: c}"])
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match="`data.val_files` .* must be a list of files, or a mapping from names"):
        compose([f"data.val_files={value}"], "dapo_tiny")
