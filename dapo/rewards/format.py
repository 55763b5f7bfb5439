"""Scores a layout: one <think>...</think>, then one <answer>...</answer>, and nothing outside. Returns no `acc`,
because the form says nothing about the answer; combine it with a verifier by weight."""

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
    """Returns 1.0 if each of the four tags occurs once, in order, with only white space outside and text in both parts;
    else 0.0. think, answer: the tags' names. opened: the chat template has already written the first tag. Also returns
    how often each tag occurs, as metrics: think_open (includes the template's), think_close, answer_open, answer_close.
    Raises ValueError for equal names or a name that is not a letter followed by letters, digits, `_` and `-`."""
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
    think, answer = kwargs.get("think", "think"), kwargs.get("answer", "answer")
    first = "" if kwargs.get("opened", False) else f"<{think}>"
    yield f"{first}2 + 2 is 4.</{think}>\n<{answer}>4</{answer}>\n", "4", {}, 1.0
    yield f"{first}2 + 2 is 4.</{think}>\n<{answer}>4</{answer}> Done.", "4", {}, 0.0
    yield f"<{answer}>4</{answer}>", "4", {}, 0.0


def _in_order(text: str, tags: tuple[str, str, str, str]) -> bool:
    """Whether the tags, each of which occurs once, enclose all of the text except white space."""
    rest, parts = text, []
    for tag in tags:
        part, found, rest = rest.partition(tag)
        if not found:
            return False
        parts.append(part.strip())
    before, thought, between, answered = parts
    return bool(thought and answered) and not (before or between or rest.strip())
