"""Scores a layout: one <think>...</think>, then one <answer>...</answer>, and nothing outside.

A score for the form alone, 1.0 or 0.0, to add to a verifier's by weight; it says nothing about the answer, so no `acc`.
"""

import re
from collections.abc import Iterable
from typing import Any

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    *,
    think: str = "think",
    answer: str = "answer",
    opened: bool = False,
) -> dict[str, float]:
    """Returns 1.0 when each of the four tags stands there once, in order, with only white space outside; else 0.0.

    think, answer: the tags' names. opened: the chat template has already written the first tag, so that the response
    starts inside it. Returns score and, for metrics, how often each tag occurs: think_open, think_close, answer_open,
    answer_close (of the response; with the template's tag where opened). Both parts must hold more than white space.
    Raises ValueError for a name that is not a letter with letters, digits, `_` and `-`, or for two equal names.
    """
    for key, name in (("think", think), ("answer", answer)):
        if not _NAME.fullmatch(name):
            raise ValueError(f"`{key}` ({name!r}) must be a tag's name, such as think; give it without < and >")
    if think == answer:
        raise ValueError(f"`answer` ({answer!r}) must differ from `think`; give each part a name of its own")
    text = f"<{think}>{solution_str}" if opened else solution_str
    tags = (f"<{think}>", f"</{think}>", f"<{answer}>", f"</{answer}>")
    counts = [text.count(tag) for tag in tags]
    good = counts == [1, 1, 1, 1] and _in_order(text, tags)
    names = ("think_open", "think_close", "answer_open", "answer_close")
    return {"score": float(good), **{name: float(count) for name, count in zip(names, counts, strict=True)}}


def canaries(name: str, kwargs: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any], float]]:
    """Yields known responses, as (solution_str, ground_truth, extra_info, score), for the pool's check of itself."""
    think, answer = kwargs.get("think", "think"), kwargs.get("answer", "answer")
    first = "" if kwargs.get("opened", False) else f"<{think}>"
    yield f"{first}2 + 2 is 4.</{think}>\n<{answer}>4</{answer}>\n", "4", {}, 1.0
    yield f"{first}2 + 2 is 4.</{think}>\n<{answer}>4</{answer}> Done.", "4", {}, 0.0
    yield f"<{answer}>4</{answer}>", "4", {}, 0.0


def _in_order(text: str, tags: tuple[str, str, str, str]) -> bool:
    """Returns whether the tags, each of which occurs once, enclose all of the text but white space, part by part."""
    rest, parts = text, []
    for tag in tags:
        part, found, rest = rest.partition(tag)
        if not found:
            return False
        parts.append(part.strip())
    before, thought, between, answered = parts
    return bool(thought and answered) and not (before or between or rest.strip())
