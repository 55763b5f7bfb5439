"""Verifies answers by DAPO's rule (paper section 2.4), the default: solution and ground truth in, +1 or -1 out.

`dapo.rewards.reading.answer` finds and reads the answer, and compares it as a number (integer, decimal or fraction,
exactly) or else as a string; of an answer that says more, `5 apples` or `(C) 42`, the number or the choice. A ground
truth that is an equation or inequality, and no value with a name, is right only as a whole. Whatever DAPO's rule
accepts is right, but for one side of such a relation, another unit than the ground truth's, lists of answers,
calculations that were not carried out, digits other than 0 to 9, words such as [INVALID], and 0.3 where the ground
truth is the repeating decimal. The text is adversarial and never evaluated.
"""

from collections.abc import Iterable
from typing import Any

from dapo.rewards.reading.answer import TAIL_CHARS, agree, find_answer, read, read_truth

READS_LAST = TAIL_CHARS  # characters of a solution that the score depends on


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """Scores one solution, in verl's signature; only solution_str and ground_truth are looked at.

    Returns score (1.0 right, -1.0 wrong), acc (the same as a bool) and pred (the answer as it was read, "" when there
    is none, all of a list; printable). Never raises for any solution_str; bounded work whatever it holds.
    """
    answer = read(find_answer(solution_str))
    correct = agree(answer, read_truth(str(ground_truth)))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer.shown}


def canaries(name: str, kwargs: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any], float]]:
    """Yields known answers, as (solution_str, ground_truth, extra_info, score), for the pool's check of itself."""
    yield "Adding up gives 1080.\nAnswer: 1,080.", "1080", {}, 1.0
    yield "Half of it is left: \\boxed{\\frac{1}{2}}", "0.5", {}, 1.0
    yield "Answer: 1079", "1080", {}, -1.0
    yield "Answer: 540 + 540", "1080", {}, -1.0
    yield "I cannot tell.", "1080", {}, -1.0
