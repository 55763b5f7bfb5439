"""Holds the reward functions of a run: those of `reward.functions`, and those that entries of `data.sources` have in
their place.

In: both, as the configuration has them. Out: for each entry its `RewardFunctions`. Runs where those run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dapo.config.reward import RewardFunctionConfig
from dapo.config.sources import SourceConfig
from dapo.rewards.calling.functions import RewardFunctions
from dapo.rewards.calling.loading import Canary, ready_name

Specs = Sequence[RewardFunctionConfig]
Own = Mapping[str, Specs]  # by the name of the entry


def section_of(entry: str) -> str:
    """Returns where the functions of an entry stand in the configuration."""
    return f"data.sources[{entry}].functions"


def label_of(entry: str, label: str) -> str:
    """Returns the name of a function's part of the rewards: an entry's own carry its name. entry: "" for those of
    `reward.functions`."""
    return f"{entry}:{label}" if entry else label


def source_functions(sources: Sequence[SourceConfig]) -> dict[str, list[RewardFunctionConfig]]:
    """Returns the functions of the entries that have their own, by name."""
    return {source.name: source.functions for source in sources if source.functions}


def as_values(specs: Specs, own: Own) -> dict[str, list[dict[str, Any]]]:
    """Returns all of them as JSON holds them, by the name of the entry; see `FunctionsByEntry`."""
    return {name: [asdict(spec) for spec in each] for name, each in {"": specs, **own}.items()}


class FunctionsByEntry:
    """Holds them by the name of the entry, "" for those of `reward.functions`, which every other entry has. An entry's
    own carry its name before their labels: NAME:FUNCTION."""

    def __init__(self, specs: Specs, own: Own) -> None:
        """Loads every function. own: by entry. Raises ValueError naming the key of what cannot be loaded."""
        self._all = {"": RewardFunctions(specs)}
        for name, each in own.items():
            self._all[name] = RewardFunctions(each, section=section_of(name), prefix=label_of(name, ""))
        self._specs = [*specs, *(spec for each in own.values() for spec in each)]

    @property
    def runs_programs(self) -> bool:
        """Returns whether one of them runs programs that the model wrote."""
        return any(functions.runs_programs for functions in self._all.values())

    def of(self, entry: str) -> RewardFunctions:
        """Returns the functions of an entry."""
        return self._all.get(entry, self._all[""])

    def about(self) -> dict[str, Any]:
        """Returns what the reward worker must know of them; by entry `at_limit`, and `asks`: whether some are async."""
        every = self._all.values()
        limits = [functions.reads_last for functions in every]
        return {
            "digest": " ".join(functions.digest for functions in every),
            "reads_last": None if None in limits else max(limit for limit in limits if limit is not None),
            "at_limit": {name: asdict(functions.at_limit("")) for name, functions in self._all.items()},
            "canaries": [{"label": label, "canary": asdict(canary)} for label, canary in self._canaries()],
            "asks": {name: any(functions.asynchronous()) for name, functions in self._all.items()},
            "asynchronous": [label for functions in every for label, _ in functions.asynchronous()],
            "without_canary": [label for functions in every for label in functions.without_canary()],
        }

    def _canaries(self) -> list[tuple[str, Canary]]:
        return [each for functions in self._all.values() for each in functions.canaries()]

    def score_alone(self, label: str, canary: Canary) -> float:
        """Returns what one function gives for one known answer."""
        functions = next(functions for functions in self._all.values() if label in functions.labels)
        return functions.score_alone(label, canary)

    def warm_up(self) -> None:
        """Lets ready functions do here, and not in each child, what they do once (tables of parsers). A person's
        function might start threads, which do not survive a fork."""
        labels = [label for functions in self._all.values() for label in functions.labels]
        ready = {label for label, spec in zip(labels, self._specs, strict=True) if ready_name(spec.path)}
        for label, canary in self._canaries():
            if label in ready:
                self.score_alone(label, canary)
