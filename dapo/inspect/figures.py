"""What the rules read, and what they return: means of a metric over the first and the newest steps (a fifth of the run
each), reward functions compared with the accuracy, the configuration; and findings in words."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.inspect.findings import Agreement, agreements
from dapo.store.reader import Reader

MIN_STEPS = 10  # fewer show no trend
WINDOW = (3, 20)  # steps at each end, at least and at most
REWARD_STEPS = 20  # newest, whose answers are compared with the reward functions
METRICS = (
    *("actor/entropy", "actor/skipped_steps", "rollout/accuracy", "rollout/truncated", "buffer/*", "reward/failed_*"),
    *(
        "parity/mean_abs_logprob_diff",
        "parity/staleness_0/mean_abs_logprob_diff",
        "perf/*_s",
        "perf/engine/idle",
        "eval/*accuracy*",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A key that may resolve a finding. value: its value in this run; None: not known. how: in words."""

    key: str
    value: Any
    how: str

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return f"`{self.key}`{'' if self.value is None or len(value) > 40 else f' ({value})'}: {self.how}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One finding. what: in words with figures. changes: the most likely remedy first. draws: groups that show it."""

    rule: str
    what: str
    changes: tuple[Change, ...]
    draws: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ends:
    """Means of a metric over the first and over the newest steps of a run, and which steps these are."""

    first: float
    last: float
    first_steps: str
    last_steps: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Input of the rules. metrics: by name and step. rewards: of the newest steps. config: nested."""

    metrics: Mapping[str, Mapping[int, float]]
    rewards: Sequence[Agreement]
    config: Mapping[str, Any]

    def ends(self, name: str) -> Ends | None:
        """Returns the first and newest means of a metric; None if it has too few steps."""
        values = self.metrics.get(name, {})
        steps = sorted(values)
        if len(steps) < MIN_STEPS:
            return None
        size = max(WINDOW[0], min(WINDOW[1], len(steps) // 5))
        parts = steps[:size], steps[-size:]
        first, last = (statistics.fmean(values[step] for step in part) for part in parts)
        return Ends(first, last, *(f"steps {part[0]} to {part[-1]}" for part in parts))

    def last(self, name: str) -> float:
        """Returns the mean over the newest steps; 0 if there are too few."""
        ends = self.ends(name)
        return 0.0 if ends is None else ends.last

    def value(self, key: str) -> Any:
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def changes(self, *given: tuple[str, str] | tuple[str, str, Any]) -> tuple[Change, ...]:
        """Returns each (key, how) with its value in this run; skips (key, how, best value) if the value is the best."""
        pairs = [(self.value(key), key, how, best) for key, how, *best in given]
        return tuple(Change(key=key, value=value, how=how) for value, key, how, best in pairs if [value] != best)


def figures(store: Reader) -> Figures:
    starts = store.starts()
    return Figures(
        metrics=store.metrics(*METRICS),
        rewards=agreements(store.rewards(REWARD_STEPS)),
        config=starts[-1]["config"] if starts else {},
    )
