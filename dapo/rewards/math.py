"""Verifies answers by DAPO's rule (paper section 2.4), the default: returns +1 or -1.

`dapo.answers.answer` finds the answer and compares it as a number (integer, decimal or fraction, exactly) or
else as a string; of `5 apples` or `(C) 42`, the number or the choice. A ground truth that is an equation or inequality
(and not a named value) must match as a whole. Everything that DAPO's rule accepts is correct, except: one side of such
a relation, a unit different from the ground truth's, lists of answers, unevaluated calculations, digits other than 0 to
9, words such as [INVALID], and 0.3 for a repeating decimal. The text is adversarial and never evaluated.
"""

from collections.abc import Iterable
from typing import Any

from dapo.answers.answer import TAIL_CHARS, agree, find_answer, read, read_truth

READS_LAST = TAIL_CHARS  # characters of a solution that the score depends on


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """Scores one solution, in verl's signature; only solution_str and ground_truth are used. Returns score (1.0 or
    -1.0), acc (bool) and pred (the parsed answer, printable; "" if there is none, all of a list). Never raises for any
    solution_str; the work is bounded."""
    answer = read(find_answer(solution_str))
    correct = agree(answer, read_truth(str(ground_truth)))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer.shown}


def canaries(name: str, kwargs: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any], float]]:
    yield "Adding up gives 1080.\nAnswer: 1,080.", "1080", {}, 1.0
    yield "Half of it is left: \\boxed{\\frac{1}{2}}", "0.5", {}, 1.0
    yield "Answer: 1079", "1080", {}, -1.0
    yield "Answer: 540 + 540", "1080", {}, -1.0
    yield "I cannot tell.", "1080", {}, -1.0
