"""Selects the groups that the page shows with their answers: a few per step, those that a reader would look for.
Output: plain values for JSON, of bounded size. To stay below, answers are shortened to their beginning and end, then
fewer groups are shown."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo.ground.console import plain
from dapo.report.store.reader import Reader
from dapo.tools.inspect.findings import why
from dapo.tools.inspect.show import beginning

STEPS = 40  # with groups to look at: the first, the last, and steps evenly between
SIDE = 3  # answers of a group that are right, wrong, or without a verdict, of each at most
LONGEST_TEXT, SHORTEST_TEXT = 16384, 256  # characters of an answer; as many as `MAX_BYTES` allows
LONGEST_QUESTION = 4096
SHORT = 300  # characters of a ground truth, and of what was read as the answer
MAX_BYTES = 600_000  # of all groups of a page

Row = Mapping[str, Any]
Pieces = list[Any]  # of a text: its beginning, how many characters are left out, its end
KINDS: dict[str, tuple[Callable[[Row], bool], Callable[[Row], Any]]] = {  # which groups, and the first of what order
    "most split": (lambda row: bool(row["variance"]), lambda row: -row["variance"]),
    "best": (lambda row: row["accuracy"] is not None, lambda row: (-row["accuracy"], -(row["reward"] or 0.0))),
    "worst": (lambda row: row["accuracy"] is not None, lambda row: (row["accuracy"], row["reward"] or 0.0)),
    "longest": (lambda row: row["tokens"] > 0, lambda row: -row["longest"]),
    "truncated": (lambda row: row["truncated"] > 0, lambda row: -row["truncated"]),
    "unscorable": (lambda row: row["scorable"] < row["responses"], lambda row: row["scorable"]),
}


def browser(store: Reader, steps: Sequence[int], most_bytes: int) -> list[dict[str, Any]]:
    """Returns groups with answers, oldest step first. steps: of the run."""
    shown = [(row, kinds) for step in spread(steps, STEPS) for row, kinds in picked(store.groups(step))]
    return bounded([_group(store, row, kinds) for row, kinds in shown], most_bytes)


def whole(store: Reader, draw: int) -> dict[str, Any] | None:
    """Returns a group with all its answers."""
    answers = store.group(draw)
    row = next((row for row in store.groups(answers[0]["step"]) if row["draw"] == draw), None) if answers else None
    return None if row is None else _group(store, row, [], most=len(answers))


def spread(steps: Sequence[int], most: int) -> list[int]:
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def picked(rows: Sequence[Row]) -> list[tuple[Row, list[str]]]:
    """Returns the first group of each kind, with all the kinds that it belongs to."""
    found: dict[int, tuple[Row, list[str]]] = {}
    for kind, (which, order) in KINDS.items():
        fitting = [row for row in rows if which(row)]
        if fitting:
            row = min(fitting, key=order)
            found.setdefault(row["draw"], (row, []))[1].append(kind)
    return list(found.values())


def _group(store: Reader, row: Row, kinds: list[str], most: int = SIDE) -> dict[str, Any]:
    answers = store.group(row["draw"])
    sides = [
        ("right", [one for one in answers if one["accuracy"] is not None and one["accuracy"] > 0.5]),
        ("wrong", [one for one in answers if one["accuracy"] is not None and one["accuracy"] <= 0.5]),
        ("no verdict", [one for one in answers if one["accuracy"] is None]),
    ]
    return {
        **{name: row[name] for name in ("draw", "step", "prompt", "accuracy", "longest", "version")},
        "kinds": kinds,
        "source": beginning(plain(row["source"])),
        "question": shortened([row["question"], 0, ""], LONGEST_QUESTION),
        "truth": plain(row["ground_truth"][:SHORT]),
        "why": plain(why(row)),
        "sides": [
            {"side": side, "all": len(those), "answers": [_answer(*one) for one in _shown(those, most)]}
            for side, those in sides
        ],
    }


def _shown(answers: Sequence[Row], most: int) -> list[tuple[Row, list[int]]]:
    """Returns at most `most` answers, the longest (truncated ones preferred) first, each with the samples that read
    the same."""
    longest = sorted(answers, key=lambda one: (one["finish_reason"] != "length", -one["tokens"]))[:1]
    alike: dict[Any, list[Row]] = {}
    for one in [*longest, *[one for one in answers if one not in longest]]:
        told = one["sample"] if one["text"] is None else (one["text"], one["reward"], one["failure"])
        alike.setdefault(told, []).append(one)
    return [(those[0], sorted(one["sample"] for one in those)) for those in alike.values()][:most]


def _answer(row: Row, samples: list[int]) -> dict[str, Any]:
    numbers = ("tokens", "finish_reason", "accuracy", "reward", "engine", "seconds")
    return {
        "samples": samples,
        **{name: row[name] for name in numbers},
        "parts": {beginning(plain(name)): value for name, value in json.loads(row["parts"]).items()},
        "prediction": plain(row["prediction"][:SHORT]),
        "failure": plain(row["failure"][:SHORT]),
        "text": None if row["text"] is None else shortened([row["text"], 0, ""], LONGEST_TEXT),
    }


def shortened(text: Pieces, most: int) -> Pieces:
    """Returns at most `most` characters, two thirds from the end, where the answer is; no control characters."""
    head, left, tail = text
    excess = len(head) + len(tail) - most
    if excess > 0:
        end = head if not left else tail
        text = [head[: most // 3], left + excess, end[len(end) - (most - most // 3) :]]
    return [plain(text[0]), text[1], plain(text[2])]


def bounded(groups: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """Shortens texts until the JSON fits into `most_bytes`; if that is not enough, drops every second group."""
    most = LONGEST_TEXT
    while len(json.dumps(groups)) > most_bytes:
        most //= 2
        if most < SHORTEST_TEXT:
            groups = groups[::2]
            continue
        for group in groups:
            group["question"] = shortened(group["question"], most)
            for answer in [answer for side in group["sides"] for answer in side["answers"]]:
                answer["text"] = None if answer["text"] is None else shortened(answer["text"], most)
    return groups
