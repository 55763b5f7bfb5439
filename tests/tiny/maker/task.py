"""Makes the addition task: problems, written-out solutions, disjoint splits, and rows in the DAPO-Math schema.

In: a seed and a split. Out: problems such as `37+5+18+4=`, whose solution writes every running sum on a line of its
own and ends in `Answer: 64`. More addends mean a longer and a harder response, so pass rates differ between prompts.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Callable
from typing import Any, Literal

Addends = tuple[int, ...]
Split = Literal["base", "rl", "heldout"]
Draw = Callable[[random.Random, Split], Addends]

DATA_SOURCE = "tiny_addition"

# Share of problems with 2, 3, 4, 5 and 6 addends: falling, so that the mean response has about 30 tokens.
_COUNT_WEIGHTS = {2: 0.30, 3: 0.27, 4: 0.20, 5: 0.13, 6: 0.10}
_ONE_DIGIT_SHARE = 0.4
# A wrong running sum is a slip of the pen (one or two off) or a lost or invented carry (ten off).
_SLIPS = (-10, -2, -1, 1, 2, 10)
# Tenths of all problems that each split owns, in order.
_SPLIT_TENTHS: dict[Split, range] = {"base": range(0, 5), "rl": range(5, 9), "heldout": range(9, 10)}
_ANSWER = re.compile(r"^Answer: (.+)$", re.MULTILINE)


def problem_text(addends: Addends) -> str:
    """Returns the user's message: `(37, 5, 18)` becomes `37+5+18=`."""
    return "+".join(map(str, addends)) + "="


def split_of(addends: Addends) -> Split:
    """Returns the one split that owns a problem, by a hash of its text with the addends sorted.

    Sorting puts `37+5=` and `5+37=` into the same split: a held-out problem is new in every order.
    """
    digest = hashlib.sha256(problem_text(tuple(sorted(addends))).encode()).digest()
    tenth = int.from_bytes(digest[:8], "big") % 10
    return next(split for split, tenths in _SPLIT_TENTHS.items() if tenth in tenths)


def draw_problem(rng: random.Random, split: Split) -> Addends:
    """Draws a random problem of a split: 2 to 6 addends, each of one or two digits, none zero."""
    while True:
        (count,) = rng.choices(list(_COUNT_WEIGHTS), weights=list(_COUNT_WEIGHTS.values()))
        addends = tuple(
            rng.randint(1, 9) if rng.random() < _ONE_DIGIT_SHARE else rng.randint(10, 99) for _ in range(count)
        )
        if split_of(addends) == split:
            return addends


def distinct_problems(split: Split, count: int, seed: int, draw: Draw = draw_problem) -> list[Addends]:
    """Returns `count` problems of a split, no two with the same text; the same seed gives the same list."""
    rng = random.Random(seed)
    problems: dict[Addends, None] = {}
    while len(problems) < count:
        problems[draw(rng, split)] = None
    return list(problems)


def solution(addends: Addends, rng: random.Random | None = None, error_rate: float = 0.0) -> str:
    """Writes running sums line by line, then the answer line.

    Each sum is wrong with probability `error_rate` (then `rng` is needed); the next line goes on from the wrong sum,
    so that one slip usually makes the answer wrong.
    """
    lines, total = running_sums(addends, rng, error_rate)
    return "\n".join([*lines, f"Answer: {total}"])


def running_sums(
    addends: Addends, rng: random.Random | None, error_rate: float | Callable[[int, int], float]
) -> tuple[list[str], int]:
    """Writes the running sums, a line each, wrong ones as in `solution`; returns the lines and the last sum.

    error_rate: of every sum, or of one of these two numbers.
    """
    lines, total = [], addends[0]
    for addend in addends[1:]:
        result = total + addend
        if rng is not None and rng.random() < (error_rate(total, addend) if callable(error_rate) else error_rate):
            result = rng.choice([result + slip for slip in _SLIPS if result + slip > 0])
        lines.append(f"{total}+{addend}={result}")
        total = result
    return lines, total


def is_correct(response: str, addends: Addends) -> bool:
    """Says whether the last `Answer:` line holds the sum. For this folder's own reports; training uses the verifier."""
    answers = _ANSWER.findall(response)
    return bool(answers) and answers[-1].strip() == str(sum(addends))


def rows(
    split: Split, count: int, seed: int, *, source: str = DATA_SOURCE, draw: Draw = draw_problem
) -> list[dict[str, Any]]:
    """Returns `count` distinct problems of a split as records of the DAPO-Math schema."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": problem_text(addends)}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(sum(addends)), "style": "rule"},
            "extra_info": {"index": index, "split": split, "num_addends": len(addends)},
        }
        for index, addends in zip(itertools.count(), distinct_problems(split, count, seed, draw), strict=False)
    ]
