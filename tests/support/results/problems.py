"""Answers to held-out problems, as an evaluation has them (tests only)."""

from dataclasses import replace

from dapo.types import Group
from tests.support.fakes import make_group


def asked(number: int, text: str, truth: str, *accuracies: float, source: str = "test") -> Group:
    """Answers to the problem in row `number` of its file. source: its data source."""
    group = make_group(number, accuracies)
    prompt = replace(group.draw.prompt, text=text, ground_truth=truth, source=source)
    return replace(group, draw=replace(group.draw, prompt=prompt))
