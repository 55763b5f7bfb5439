"""Explains why a group was dropped or a step was slow, and how far reward functions agree with accuracy."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.store.reader import PHASES

Row = Mapping[str, Any]


def why(group: Row) -> str:
    n, scorable = group["responses"], group["scorable"]
    without = "" if scorable == n else f" of {scorable} that could be scored"
    right = "" if group["accuracy"] is None else f"{group['accuracy'] * scorable:.4g} right{without or f' of {n}'}"
    words = {
        "trained": f"trained on: {right}",
        "all_correct": f"dropped, all correct: {right}",
        "all_wrong": f"dropped, all wrong: {right}",
        "unscorable": f"dropped, unscorable: {n - scorable} of {n} have no verdict (`filter_groups.min_scored`)",
        "overlong": f"dropped, overlong: {group['truncated']} of {n} truncated, no advantage in the rest "
        "(`reward.overlong_filtering`)",
    }
    return words.get(group["fate"], str(group["fate"]))


def why_slow(step: Row, steps: Sequence[Row], warnings: Sequence[str]) -> str:
    """Describes what took longer than in the median step; "" if nothing did. steps: all."""
    found = []
    excess = {phase: (step[phase] or 0.0) - _median(steps, phase) for phase in PHASES}
    phase = max(excess, key=lambda name: excess[name])
    if excess[phase] > 0.05 * (step["seconds"] or 0.0):
        waited = "waited for an " if phase == "evaluation" else ""
        found.append(f"{waited}{phase} {step[phase]:.3g} s (median {_median(steps, phase):.3g} s)")
    for name, words in (("drawn", "groups drawn"), ("longest", "tokens in the longest answer")):
        if (step[name] or 0) > 1.2 * _median(steps, name):
            found.append(f"{step[name]} {words} (median {_median(steps, name):.0f})")
    return "; ".join([*found, *warnings])


def _median(steps: Sequence[Row], name: str) -> float:
    return statistics.median([step[name] or 0.0 for step in steps])


@dataclass(slots=True)
class Agreement:
    """How a reward function orders the answers to one prompt, compared with their accuracies. A pair is two answers of
    a group with different accuracies. wrong: pairs in which the worse answer got more; even: as much. by_draw: (wrong +
    even / 2) per group with a wrong pair."""

    name: str
    pairs: int = 0
    wrong: int = 0
    even: int = 0
    values: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})  # by accuracy above 0.5
    by_draw: dict[int, float] = field(default_factory=dict)

    @property
    def disagreement(self) -> float:
        """Share of pairs in the wrong order, ties as half: 0 agrees, 0.5 no information, 1 contradicts; NaN without
        pairs."""
        return (self.wrong + self.even / 2) / self.pairs if self.pairs else float("nan")

    @property
    def silent(self) -> bool:
        """Whether both answers of every pair get the same reward."""
        return self.even == self.pairs

    def mean(self, right: bool) -> float:
        """Returns the mean over the correct, or over the wrong, answers; NaN without one."""
        values = self.values[right]
        return statistics.fmean(values) if values else float("nan")

    @property
    def worst_draw(self) -> int | None:
        """The group with the most pairs in the wrong order; None if no pair is in the wrong order."""
        draw = max(self.by_draw, key=lambda index: self.by_draw[index], default=None)
        return draw if draw is not None and self.wrong else None

    def add(self, draw: int, scored: Sequence[tuple[float, float]]) -> None:
        for accuracy, value in scored:
            self.values[accuracy > 0.5].append(value)
        wrong = even = pairs = 0
        for (one, given), (other, gave) in itertools.combinations(scored, 2):
            if one != other:
                pairs += 1
                even += given == gave
                wrong += (one > other) == (given < gave) and given != gave
        self.pairs, self.wrong, self.even = self.pairs + pairs, self.wrong + wrong, self.even + even
        if wrong:
            self.by_draw[draw] = wrong + even / 2


def agreements(rewards: Iterable[tuple[int, float | None, Mapping[str, float | None]]]) -> list[Agreement]:
    """Returns one per reward function, the one that disagrees most first, silent ones last. rewards: (draw, accuracy,
    reward by function) of each answer, ordered by group."""
    found: dict[str, Agreement] = {}
    for draw, answers in itertools.groupby(rewards, key=lambda answer: answer[0]):
        scored: dict[str, list[tuple[float, float]]] = {}
        for _, accuracy, parts in answers:
            for name, value in parts.items():
                if accuracy is not None and value is not None:
                    scored.setdefault(name, []).append((accuracy, value))
        for name, values in scored.items():
            found.setdefault(name, Agreement(name)).add(draw, values)
    return sorted(found.values(), key=lambda one: (one.silent, -one.disagreement if one.pairs else 1.0, one.name))
