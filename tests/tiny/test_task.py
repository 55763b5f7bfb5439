"""The tiny tasks: their problems, solutions and splits, and the data as shipped."""

import random
import re

import pyarrow.parquet as pq
import pytest

from dapo.rewards.math import compute_score
from tests.tiny.maker import checked_sums, make_data
from tests.tiny.maker.checked_sums import carries, checked_solution, draw_checked_sum
from tests.tiny.maker.task import (
    DATA_SOURCE,
    Addends,
    Split,
    distinct_problems,
    is_correct,
    problem_text,
    solution,
    split_of,
)

LINE = re.compile(r"(\d+)\+(\d+)=(\d+)")


def addends_of(text: str) -> Addends:
    """Inverts `tests.tiny.maker.task.problem_text`."""
    return tuple(int(part) for part in text.removesuffix("=").split("+"))


def is_right(source: str, text: str, addends: Addends) -> bool:
    return bool(compute_score(source, text, str(sum(addends)))["acc"])


def test_a_solution_writes_every_running_sum() -> None:
    assert problem_text((37, 5, 18, 4)) == "37+5+18+4="
    assert solution((37, 5, 18, 4)) == "37+5=42\n42+18=60\n60+4=64\nAnswer: 64"
    for addends in distinct_problems("rl", 200, seed=6):
        assert is_right(DATA_SOURCE, solution(addends), addends) and is_correct(solution(addends), addends)


@pytest.mark.parametrize("split", ["base", "rl", "heldout"])
def test_a_problem_belongs_to_one_split_in_every_order(split: Split) -> None:
    rng = random.Random(0)
    problems = distinct_problems(split, 200, seed=5)
    assert len(set(map(problem_text, problems))) == 200 and problems != distinct_problems(split, 200, seed=4)
    for addends in problems:
        assert split_of(addends) == split_of(tuple(rng.sample(addends, len(addends)))) == split
        assert addends_of(problem_text(addends)) == addends


def test_the_shipped_data_is_what_the_code_makes() -> None:
    made = make_data.tables()
    assert {name: len(rows) for name, rows in made.items()} == {
        **{"train.parquet": 6000, "long_train.parquet": 6000, "checked_train.parquet": 2000},
        **{name: 512 for name in ("val.parquet", "long_val.parquet", "checked_val.parquet")},
    }
    for name, rows in made.items():
        assert pq.read_table(make_data.DATA_DIR / name).to_pylist() == rows, name
        problems = [addends_of(row["prompt"][0]["content"]) for row in rows]
        assert {split_of(addends) for addends in problems} == {"rl" if "train" in name else "heldout"}
        assert [row["reward_model"]["ground_truth"] for row in rows] == [str(sum(addends)) for addends in problems]
        assert len(set(problems)) == len(problems)


def passes(text: str) -> list[list[str]]:
    *lines, _ = text.split("\n")
    return [part.split("\n") for part in "\n".join(lines).split("\nCheck\n")]


def test_a_checked_solution_checks_itself_until_two_passes_agree() -> None:
    rng, checked = random.Random(1), 0
    right: dict[bool, list[bool]] = {False: [], True: []}
    slips: dict[bool, list[bool]] = {False: [], True: []}
    for _ in range(3000):
        addends = draw_checked_sum(rng, "base")
        text = checked_solution(addends, rng, slips=True)
        written = passes(text)
        lasts = [part[-1].partition("=")[2] for part in written]
        assert text.endswith(f"\nAnswer: {lasts[-1]}") and len(written) <= 3
        if len(written) > 1:
            assert (len(written) == 2) == (lasts[0] == lasts[1])
        for part in written:
            found = [tuple(map(int, each.groups())) for line in part if (each := LINE.fullmatch(line))]
            assert [addend for _, addend, _ in found] == list(addends[1:])
            for total, addend, result in found:
                slips[total % 10 + addend % 10 >= 10].append(total + addend != result)
        checked += len(written) > 1
        right[len(written) > 1].append(is_right(checked_sums.DATA_SOURCE, text, addends))
        assert checked_solution(addends, rng, slips=False).endswith(f"Answer: {sum(addends)}")
    for carry, rate in ((True, checked_sums.CARRY_SLIP_RATE), (False, checked_sums.OTHER_SLIP_RATE)):
        assert sum(slips[carry]) / len(slips[carry]) == pytest.approx(rate, abs=0.015)
    assert checked / 3000 == pytest.approx(checked_sums.CHECK_RATE, abs=0.03)
    assert sum(right[True]) / len(right[True]) > sum(right[False]) / len(right[False]) + 0.03, "a check helps"
    assert [carries(each) for each in ((2, 3), (5, 5), (15, 4, 1), (9, 9, 9, 9), (7,))] == [0, 1, 1, 3, 0]
