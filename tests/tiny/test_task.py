"""The addition task, its data and its files as shipped."""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dapo.rewards.math import compute_score
from dapo.tiny import make_data
from dapo.tiny.task import (
    DATA_SOURCE,
    Split,
    distinct_problems,
    draw_problem,
    is_correct,
    problem_text,
    solution,
    split_of,
)
from tests.support.addends import addends_of

SHIPPED = make_data.DATA_DIR.parent
SPLITS: list[Split] = ["base", "rl", "heldout"]


def read(name: str) -> list[dict]:
    return pq.read_table(make_data.DATA_DIR / name).to_pylist()


def test_solution_writes_every_running_sum() -> None:
    assert problem_text((37, 5, 18, 4)) == "37+5+18+4="
    assert solution((37, 5, 18, 4)) == "37+5=42\n42+18=60\n60+4=64\nAnswer: 64"


@pytest.mark.parametrize("split", SPLITS)
def test_a_problem_belongs_to_one_split_in_every_order(split: Split) -> None:
    rng = random.Random(0)
    for addends in distinct_problems(split, 200, seed=5):
        assert split_of(addends) == split
        assert split_of(tuple(rng.sample(addends, len(addends)))) == split


def test_every_split_gets_its_share() -> None:
    rng = random.Random(0)
    found = [split_of((rng.randint(1, 99), rng.randint(1, 99), rng.randint(1, 99))) for _ in range(5000)]
    shares = [found.count(split) / len(found) for split in SPLITS]
    assert shares == pytest.approx([0.5, 0.4, 0.1], abs=0.03)


def test_problems_are_distinct_and_repeatable() -> None:
    problems = distinct_problems("rl", 500, seed=3)
    assert len(set(map(problem_text, problems))) == 500
    assert problems == distinct_problems("rl", 500, seed=3)
    assert problems != distinct_problems("rl", 500, seed=4)
    assert all(addends_of(problem_text(addends)) == addends for addends in problems)


def test_a_solution_without_errors_is_right_for_the_verifier() -> None:
    for addends in distinct_problems("rl", 200, seed=6):
        verdict = compute_score(DATA_SOURCE, solution(addends), str(sum(addends)))
        assert verdict["acc"] and verdict["score"] == 1.0 and is_correct(solution(addends), addends)


def test_errors_come_at_their_rate_and_propagate() -> None:
    rng = random.Random(7)
    wrong_steps = steps = 0
    for _ in range(2000):
        addends = draw_problem(rng, "base")
        text = solution(addends, rng, error_rate=0.25)
        *sums, answer = text.splitlines()
        total = str(addends[0])
        for line, addend in zip(sums, addends[1:], strict=True):
            left, right = line.split("=")
            assert left == f"{total}+{addend}" and int(right) > 0
            wrong_steps += int(right) != int(total) + addend
            steps += 1
            total = right
        assert answer == f"Answer: {total}"
        assert is_correct(text, addends) == compute_score(DATA_SOURCE, text, str(sum(addends)))["acc"]
    assert wrong_steps / steps == pytest.approx(0.25, abs=0.03)


def test_response_lengths_vary_around_thirty_characters() -> None:
    rng = random.Random(8)
    lengths = [len(solution(draw_problem(rng, "rl"))) + 1 for _ in range(3000)]
    assert 28 <= sum(lengths) / len(lengths) <= 36
    assert 14 <= min(lengths) <= 20 and 60 <= max(lengths) <= 75


@pytest.mark.parametrize("name", ["train.parquet", "val.parquet", "long_train.parquet", "long_val.parquet"])
def test_shipped_data_is_what_the_code_makes(name: str) -> None:
    assert read(name) == make_data.tables()[name]


def test_shipped_rows_have_the_schema_and_no_duplicates() -> None:
    train, val = read("train.parquet"), read("val.parquet")
    assert (len(train), len(val)) == (6000, 512)
    for row in [*train, *val]:
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        ((role, content),) = [(message["role"], message["content"]) for message in row["prompt"]]
        assert role == "user"
        assert row["reward_model"] == {"ground_truth": str(sum(addends_of(content))), "style": "rule"}
        assert row["extra_info"]["split"] == split_of(addends_of(content))
    texts = [row["prompt"][0]["content"] for row in [*train, *val]]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("folder", ["data", "base", "tool"])
def test_shipped_files_are_small(folder: str) -> None:
    files = [path for path in Path(SHIPPED / folder).iterdir() if path.is_file()]
    assert files
    assert max(path.stat().st_size for path in files) <= 4_000_000
