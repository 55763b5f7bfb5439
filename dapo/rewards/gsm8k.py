"""Verifies answers in GSM8K's format: +1 if the number after the last `####` equals the ground truth's, else -1. A
ground truth is the number, or the data set's whole reference solution, which ends with `#### 1,080`."""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from dapo.answers.answer import MAX_TRUTH_CHARS, NUMBER_WORD, TAIL_CHARS, Reading, agree, read, truth_text

READS_LAST = TAIL_CHARS  # characters of a solution that the score depends on

_MARK = "####"
# Up to three words for what is counted, except words that change the number or add a second answer.
_WORD = (
    rf"\s+(?!(?:{NUMBER_WORD}|or|and|to|by|in|of|plus|minus|times|divided|over|under|above|below|less|more|fewer|percent"
    r"|squared|cubed|root|factorial|choose|mod|negative|maybe|perhaps|possibly|probably|not|but|else|if|is|are|was"
    r"|bn|mn|mil|mio|tn)(?![a-z]))[a-z]{2,}"
)
_COUNTED = re.compile(rf"(?<=[0-9])(?:{_WORD}){{1,3}}\.?$", re.IGNORECASE)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """Scores one solution, in verl's signature; only solution_str and ground_truth are used. The line after the last
    mark must be one number, read as in `dapo.rewards.math` (with thousands separators, a dollar sign, a unit or a final
    dot), optionally followed by what is counted (18 eggs). Returns score (1.0 or -1.0), acc (bool) and pred (the parsed
    answer, "" if there is none). Never raises for any solution_str."""
    line = _after_mark(solution_str[-TAIL_CHARS:])
    answer = read(line)
    if answer.value is None:
        answer = read(_COUNTED.sub("", line))
    correct = answer.value is not None and agree(answer, _read_truth(str(ground_truth)))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer.shown}


def canaries(name: str, kwargs: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any], float]]:
    yield "She makes 9 * 2 = 18 dollars.\n#### $18.00", "She makes 9 * 2 = <<9*2=18>>18.\n#### 18", {}, 1.0
    yield "#### 1,080", "1080", {}, 1.0
    yield "#### 18", "1080", {}, -1.0
    yield "#### 9 * 2", "18", {}, -1.0
    yield "18", "18", {}, -1.0


def _after_mark(text: str) -> str:
    """Returns the line after the last mark, or ""; if the mark ends its line, the next line."""
    _, mark, behind = text.rpartition(_MARK)
    return behind.strip().partition("\n")[0] if mark else ""


@lru_cache(maxsize=4096)
def _read_truth(truth: str) -> Reading:
    truth = truth_text(truth)
    number = _after_mark(truth) if _MARK in truth else truth
    return read(number[:MAX_TRUTH_CHARS])
