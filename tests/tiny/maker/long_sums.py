"""Makes the tool task: sums that are too long for a tiny model to do by hand, and how it calls a calculator for them.

In: a seed and a split. Out: problems such as `3847+291+7714+502=`, and dialogues in the form of `tool_use` in
`dapo.turns`: a call, its result, the answer; or the answer at once. Splits and rows are those of `task`.
"""

import random

from tests.tiny.maker.task import Addends, Split, split_of

DATA_SOURCE = "tiny_long_sums"
# What the base model does: mostly no call, and copies with mistakes in those that it makes.
CALL_RATE = 0.3
ERROR_RATE = 0.05


def draw_long_sum(rng: random.Random, split: Split) -> Addends:
    """Draws a random problem of a split: 3 to 5 addends, each of three or four digits."""
    while True:
        addends = tuple(rng.randint(100, 9999) for _ in range(rng.randint(3, 5)))
        if split_of(addends) == split:
            return addends


def dialogue(addends: Addends, rng: random.Random | None = None) -> list[tuple[str, bool]]:
    """Returns the parts of a response in their order, each with whether the policy says it or the tool.

    Without `rng` the policy calls the tool and copies without mistakes. With it, it does so as the base model is to: it
    calls at `CALL_RATE` and answers at once otherwise, and each number that it copies is wrong at `ERROR_RATE`.
    """
    if rng is not None and rng.random() >= CALL_RATE:
        return [(f"Answer: {sum(addends)}", True)]
    copied = [_copy(addend, rng) for addend in addends]
    result = sum(copied)
    return [
        (f"<calc>{'+'.join(map(str, copied))}</calc>", True),
        (f"<result>{result}</result>", False),
        (f"\nAnswer: {_copy(result, rng)}", True),
    ]


def _copy(number: int, rng: random.Random | None) -> int:
    """Returns the number or, at `ERROR_RATE`, one with another digit in some place but the first."""
    if rng is None or rng.random() >= ERROR_RATE:
        return number
    place = 10 ** rng.randrange(len(str(number)) - 1)
    digit = number // place % 10
    return number + place * (rng.choice([other for other in range(10) if other != digit]) - digit)
