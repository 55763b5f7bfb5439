"""Makes the ladder's task: sums of 2 to 14 numbers, which may be worked out again to check them.

In: a seed and a split. Out: problems of the addition task, and solutions that write the running sums once, and at
times once more after `Check`; where the two disagree, again. More numbers make a longer and a harder response, and a
check costs as many tokens as the sum. The base model is taught `draw_checked_sum`; prompts and held-out problems are
`draw_prompt`: many that it solves nine times in ten, many that it hardly ever does, and few between.
"""

import itertools
import random

from tests.tiny.maker.task import Addends, Split, running_sums, split_of

DATA_SOURCE = "tiny_checked_sums"
# What the base model is taught: share of problems by how many numbers they have.
COUNT_WEIGHTS = {2: 0.30, 3: 0.15, 5: 0.10, 8: 0.10, 14: 0.35}
# What the base model does: slips in running sums, mostly where units carry, and checks.
CARRY_SLIP_RATE, OTHER_SLIP_RATE = 0.65, 0.02
CHECK_RATE = 0.4
MAX_PASSES = 3
# What is trained on and measured: shares of short sums without a carry, of the longest ones, and of any between.
EASY_SHARE, HARD_SHARE = 0.4, 0.4
EASY_COUNTS, HARD_COUNT, OTHER_COUNTS = (2, 3), 14, (2, 3, 5, 8)


def draw_checked_sum(rng: random.Random, split: Split) -> Addends:
    """Draws a random problem of a split: 2 to 14 addends of one or two digits."""
    while True:
        (count,) = rng.choices(list(COUNT_WEIGHTS), weights=list(COUNT_WEIGHTS.values()))
        addends = tuple(rng.randint(1, 99) for _ in range(count))
        if split_of(addends) == split:
            return addends


def draw_prompt(rng: random.Random, split: Split) -> Addends:
    """Draws a random prompt of a split, of one of three kinds; see `EASY_SHARE`."""
    kind, other = rng.random(), rng.choice(OTHER_COUNTS)
    while True:
        if kind < EASY_SHARE:
            count = rng.choice(EASY_COUNTS)
        else:
            count = HARD_COUNT if kind < EASY_SHARE + HARD_SHARE else other
        addends = tuple(rng.randint(1, 99) for _ in range(count))
        if split_of(addends) == split and (kind >= EASY_SHARE or not carries(addends)):
            return addends


def carries(addends: Addends) -> int:
    """Counts the running sums in which units carry."""
    totals = itertools.accumulate(addends)
    return sum(total % 10 + addend % 10 >= 10 for total, addend in zip(totals, addends[1:], strict=False))


def slip_rate(total: int, addend: int) -> float:
    """Returns how often the base model slips in this sum."""
    return CARRY_SLIP_RATE if total % 10 + addend % 10 >= 10 else OTHER_SLIP_RATE


def checked_solution(addends: Addends, rng: random.Random, *, slips: bool) -> str:
    """Writes running sums line by line; at `CHECK_RATE` writes them again, with slips of their own, and again while the
    last two passes disagree, three at most; then the answer line, which has the last pass's sum."""
    rate = slip_rate if slips else 0.0
    lines, total = running_sums(addends, rng, rate)
    if rng.random() < CHECK_RATE:
        before = None
        for _ in range(MAX_PASSES - 1):
            if before == total:
                break
            before = total
            again, total = running_sums(addends, rng, rate)
            lines += ["Check", *again]
    return "\n".join([*lines, f"Answer: {total}"])
