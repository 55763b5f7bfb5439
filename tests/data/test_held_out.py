"""Held-out sets: by name, and rows that repeat a problem as its samples, as AIME-2024 is published."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.data.sources import held_out_files, load_held_out
from dapo.evaluate.evaluation import Evaluation
from dapo.evaluate.summary import metrics, summaries
from tests.data.test_published_layout import CountingTokenizer, published
from tests.support.fakes import FakeRewards, FakeRollouts
from tests.support.faulty_pools import run

AIME = Path(__file__).resolve().parents[3] / "shared" / "data" / "aime-2024.parquet"


def config(files: Any, n: int) -> Config:
    cfg = Config()
    cfg.data.val_files, cfg.eval.n = files, n
    return cfg


def load(files: Any, n: int):
    return load_held_out(config(files, n), CountingTokenizer())


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def published_benchmark(path: Path, problems: int = 6, copies: int = 8) -> str:
    """The layout of AIME-2024: each problem in so many rows, in no order."""
    rows = [published(f"What is {i} + {i}?", str(2 * i), i) for i in range(problems) for _ in range(copies)]
    random.Random(3).shuffle(rows)
    return write(path, rows)


def once(name: str, path: Path) -> str:
    """Another file with the first row of each problem."""
    rows: dict[str, dict[str, Any]] = {}
    for row in pq.read_table(name).to_pylist():
        rows.setdefault(row["prompt"][0]["content"], row)
    return write(path, list(rows.values()))


def measured(files: str, n: int) -> dict[str, float]:
    """What an evaluation says of engines whose answers depend on their seeds alone."""
    rewards = FakeRewards(lambda prompt, sample, response: float(int(response.text) % 5 < 1 + prompt.id % 4))
    evaluation = Evaluation(load([files], n), FakeRollouts(), rewards, config([files], n), version=0)

    async def whole():
        evaluation.hurry()
        return metrics(summaries(await evaluation.answers()))

    return run(whole())


def files_of(tmp_path: Path, which: str) -> tuple[str, int, int]:
    """File, problems, rows of each."""
    if which == "made":
        return published_benchmark(tmp_path / "made.parquet"), 6, 8
    if not AIME.is_file():
        pytest.skip("the published file is not here")
    return str(AIME), 30, 32


@pytest.mark.parametrize("which", ["made", "aime"])
def test_a_file_that_repeats_its_problems_is_one_row_each_with_as_many_samples(tmp_path, which):
    file, problems, copies = files_of(tmp_path, which)
    distinct = once(file, tmp_path / "once.parquet")
    [repeated], [single] = load([file], 1), load([distinct], copies)
    assert len(repeated.prompts) == problems and repeated.samples == single.samples == (copies,) * problems
    assert [prompt.messages for prompt in repeated.prompts] == [prompt.messages for prompt in single.prompts]
    whole = measured(file, 1)
    assert whole == measured(file, copies) == measured(distinct, copies)
    assert whole["eval/samples"] == problems * copies and 0 < whole["eval/accuracy"] < 1
    assert whole != measured(distinct, copies // 2)


def test_n_is_the_least_number_of_samples(tmp_path):
    rows = [published("a", "1", 0)] * 3 + [published("b", "2", 1)]
    [held_out] = load([write(tmp_path / "a.parquet", rows)], 2)
    assert held_out.samples == (3, 2)
    with pytest.raises(ValueError, match="holds a problem 1001 times"):
        load([write(tmp_path / "b.parquet", rows[:1] * 1001)], 2)


def test_sets_have_the_names_and_files_of_the_configuration(tmp_path):
    one, two = (write(tmp_path / f"{name}.parquet", [published(name, "1", 0)]) for name in "ab")
    sets = load({"both": [one, two], "second": two}, 1)
    assert [(each.name, [prompt.messages[0][1][-1] for prompt in each.prompts]) for each in sets] == [
        ("both", ["a", "b"]),
        ("second", ["b"]),
    ]
    told: list[tuple[str, int]] = []
    cfg = config({"both": [one, two], "second": two}, 1)
    load_held_out(cfg, CountingTokenizer(), told=lambda key, report: told.append((key, report.kept)))
    assert told == [("data.val_files.both", 2), ("data.val_files.second", 1)]
    with pytest.raises(ValueError, match=r"`data.val_files.gone` \(.*nothing.parquet\) does not exist"):
        load({"gone": str(tmp_path / "nothing.parquet")}, 1)
    assert load(None, 1) == load([], 1) == load({}, 1) == []


def sets_of(overrides: list[str]) -> dict[str, list[str]]:
    return {one.name: one.files for one in held_out_files(compose(overrides, "dapo_tiny").data)}


@pytest.mark.parametrize(
    ("override", "sets"),
    [
        pytest.param("data.val_files=[a.parquet,b.jsonl]", {"": ["a.parquet", "b.jsonl"]}, id="list"),
        pytest.param("data.val_files={aime: a, gsm8k: [b, c]}", {"aime": ["a"], "gsm8k": ["b", "c"]}, id="mapping"),
        pytest.param("data.val_files=[]", {}, id="none"),
    ],
)
def test_a_list_or_a_mapping_takes_the_place_of_what_an_experiment_has(override, sets):
    assert sets_of([override]) == sets
    other = ["data.val_files={x: y}", override, "data.val_files=[z]", override]
    assert sets_of(other) == sets, "neither merges into the other"


@pytest.mark.parametrize("value", ["a", "{a: []}", "{a: {b: c}}", "[[a]]", "{a: 3}", "{a b: c}", "3"])
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match="`data.val_files` .* must be a list of files, or a mapping from names"):
        compose([f"data.val_files={value}"], "dapo_tiny")
