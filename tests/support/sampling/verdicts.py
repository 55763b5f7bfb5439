"""Draws and their outcomes, by index and policy version, for the tests of the buffer (tests only)."""

import functools
import math
import random
from collections.abc import Callable

from dapo.algorithm.outcome import ALL_CORRECT, ALL_WRONG, MIXED, UNSCORABLE
from dapo.types import Draw
from tests.support.fakes import make_prompt

ACCURACIES = {MIXED: [1.0, 0.0], ALL_CORRECT: [1.0, 1.0], ALL_WRONG: [0.0, 0.0], UNSCORABLE: [math.nan, 1.0]}

Verdict = Callable[[int, int], str]  # the outcome of a draw, by index and by policy version at its start


def verdicts(seed: int, share: float) -> Verdict:
    """`share` of the draws are mixed, the others anything else."""

    @functools.cache  # the audits ask again and again
    def outcome(index: int, version: int) -> str:
        rng = random.Random(f"{seed}/{index}/{version}")
        return MIXED if rng.random() < share else rng.choice([ALL_CORRECT, ALL_WRONG, UNSCORABLE])

    return outcome


def draw_of(index: int) -> Draw:
    return Draw(index=index, prompt=make_prompt(index))
