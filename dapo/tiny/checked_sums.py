"""Makes the ladder's task: sums of 2 to 14 numbers, which may be worked out again to check them.

In: a seed and a split. Out: problems of the addition task, and solutions that write the running sums once, and at
times once more after `Check`; where the two disagree, again. More numbers make a longer and a harder response, and a
check costs as many tokens as the sum: pass rates of prompts reach from 0 to 1, and it matters what length costs.
"""

import random

from dapo.tiny.task import Addends, Split, running_sums, split_of

DATA_SOURCE = "tiny_checked_sums"
# Share of problems by how many numbers they have: many that are easy, many that are nearly out of reach.
COUNT_WEIGHTS = {2: 0.30, 3: 0.15, 5: 0.10, 8: 0.10, 14: 0.35}
# What the base model does: slips in running sums, and checks.
SLIP_RATE = 0.3
CHECK_RATE = 0.4
MAX_PASSES = 3


def draw_checked_sum(rng: random.Random, split: Split) -> Addends:
    """Draws a random problem of a split: 2 to 14 addends of one or two digits."""
    while True:
        (count,) = rng.choices(list(COUNT_WEIGHTS), weights=list(COUNT_WEIGHTS.values()))
        addends = tuple(rng.randint(1, 99) for _ in range(count))
        if split_of(addends) == split:
            return addends


def checked_solution(addends: Addends, rng: random.Random, slip_rate: float = 0.0) -> str:
    """Writes running sums line by line; at `CHECK_RATE` writes them again, with slips of their own, and again while the
    last two passes disagree, three at most; then the answer line, which has the last pass's sum."""
    lines, total = running_sums(addends, rng, slip_rate)
    if rng.random() < CHECK_RATE:
        before = None
        for _ in range(MAX_PASSES - 1):
            if before == total:
                break
            before = total
            again, total = running_sums(addends, rng, slip_rate)
            lines += ["Check", *again]
    return "\n".join([*lines, f"Answer: {total}"])
