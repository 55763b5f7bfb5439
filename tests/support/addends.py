"""Reads problems of the tiny tasks back."""

from dapo.tiny.task import Addends


def addends_of(text: str) -> Addends:
    """Inverts `dapo.tiny.task.problem_text`."""
    return tuple(int(part) for part in text.removesuffix("=").split("+"))
