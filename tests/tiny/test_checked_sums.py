"""The ladder's task: its problems, how solutions check themselves, and the base model as shipped."""

import random
import re

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from dapo.config.compose import compose
from dapo.rewards.math import compute_score
from dapo.tiny.checked_sums import (
    CARRY_SLIP_RATE,
    CHECK_RATE,
    DATA_SOURCE,
    EASY_COUNTS,
    EASY_SHARE,
    HARD_COUNT,
    HARD_SHARE,
    OTHER_SLIP_RATE,
    carries,
    checked_solution,
    draw_checked_sum,
    draw_prompt,
)
from dapo.tiny.make_base import CHECKED_DIR
from dapo.tiny.make_data import tables
from dapo.tiny.report import sample
from dapo.tiny.task import distinct_problems, split_of
from tests.support.addends import addends_of

LINE = re.compile(r"(\d+)\+(\d+)=(\d+)")


def passes(solution: str) -> list[list[str]]:
    *lines, _ = solution.split("\n")
    return [part.split("\n") for part in "\n".join(lines).split("\nCheck\n")]


def test_a_solution_checks_itself_until_two_passes_agree() -> None:
    rng, checked = random.Random(1), 0
    right: dict[bool, list[bool]] = {False: [], True: []}
    slips: dict[bool, list[bool]] = {False: [], True: []}
    for _ in range(3000):
        addends = draw_checked_sum(rng, "base")
        solution = checked_solution(addends, rng, slips=True)
        written = passes(solution)
        lasts = [part[-1].partition("=")[2] for part in written]
        assert solution.endswith(f"\nAnswer: {lasts[-1]}") and len(written) <= 3
        if len(written) > 1:
            assert (len(written) == 2) == (lasts[0] == lasts[1])
        for part in written:
            found = [tuple(map(int, each.groups())) for line in part if (each := LINE.fullmatch(line))]
            assert [addend for _, addend, _ in found] == list(addends[1:])
            for total, addend, result in found:
                slips[total % 10 + addend % 10 >= 10].append(total + addend != result)
        checked += len(written) > 1
        right[len(written) > 1].append(bool(compute_score(DATA_SOURCE, solution, str(sum(addends)))["acc"]))
    for carry, rate in ((True, CARRY_SLIP_RATE), (False, OTHER_SLIP_RATE)):
        assert sum(slips[carry]) / len(slips[carry]) == pytest.approx(rate, abs=0.015)
    assert checked / 3000 == pytest.approx(CHECK_RATE, abs=0.03)
    assert sum(right[True]) / len(right[True]) > sum(right[False]) / len(right[False]) + 0.03  # a check helps


def test_without_slips_every_solution_is_right() -> None:
    rng = random.Random(2)
    for _ in range(300):
        addends = draw_checked_sum(rng, "rl")
        solution = checked_solution(addends, rng, slips=False)
        assert solution.endswith(f"Answer: {sum(addends)}") and len(passes(solution)) <= 2


def test_rows_are_sums_of_their_splits() -> None:
    for name, split in (("checked_train.parquet", "rl"), ("checked_val.parquet", "heldout")):
        problems = [addends_of(row["prompt"][0]["content"]) for row in tables()[name]]
        assert all(split_of(addends) == split for addends in problems) and len(set(problems)) == len(problems)
        easy = sum(len(addends) in EASY_COUNTS and carries(addends) == 0 for addends in problems)
        hard = sum(len(addends) == HARD_COUNT for addends in problems)
        assert easy / len(problems) == pytest.approx(EASY_SHARE, abs=0.05)
        assert hard / len(problems) == pytest.approx(HARD_SHARE, abs=0.05)


@pytest.mark.parametrize("addends, count", [((2, 3), 0), ((5, 5), 1), ((15, 4, 1), 1), ((9, 9, 9, 9), 3), ((7,), 0)])
def test_carries_are_those_of_running_sums(addends: tuple[int, ...], count: int) -> None:
    assert carries(addends) == count


def test_the_shipped_base_solves_some_prompts_mostly_and_others_hardly_ever() -> None:
    torch.manual_seed(0)
    assert (CHECKED_DIR / "model.safetensors").stat().st_size <= 4_000_000
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(CHECKED_DIR).eval(), AutoTokenizer.from_pretrained(CHECKED_DIR)
    problems = distinct_problems("heldout", 60, 9, draw_prompt)
    easy = [each for each in problems if len(each) in EASY_COUNTS and not carries(each)]
    hard = [each for each in problems if len(each) == HARD_COUNT][:13]  # they generate to their cap
    cap = compose([], "ablation/grpo").data.max_response_length
    right_easy, right_hard = (
        sample(model, tokenizer, chosen, samples=8, max_tokens=cap).correct for chosen in (easy, hard)
    )
    assert right_easy.mean() > 0.8 and right_hard.mean() < 0.1
    assert right_easy.all(axis=1).mean() > 0.2 and (~right_hard).all(axis=1).mean() > 0.6  # groups of 8
