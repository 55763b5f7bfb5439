"""The reward functions of a run by entry of `data.sources`: an entry's own functions, else those of
`reward.functions`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dapo.config.reward import RewardFunctionConfig
from dapo.config.reward_functions import label_of, ready_name, section_of
from dapo.rewards.calling.functions import RewardFunctions
from dapo.rewards.calling.loading import Canary

Specs = Sequence[RewardFunctionConfig]
Own = Mapping[str, Specs]  # by entry


def as_values(specs: Specs, own: Own) -> dict[str, list[dict[str, Any]]]:
    """Returns all functions as JSON values, by entry name; see `FunctionsByEntry`."""
    return {name: [asdict(spec) for spec in each] for name, each in {"": specs, **own}.items()}


class FunctionsByEntry:
    """Functions by entry name; "" for those of `reward.functions`, which are used by every entry without its own.
    Labels of an entry's own functions are NAME:FUNCTION."""

    def __init__(self, specs: Specs, own: Own) -> None:
        self._all = {"": RewardFunctions(specs)}
        for name, each in own.items():
            self._all[name] = RewardFunctions(each, section=section_of(name), prefix=label_of(name, ""))
        self._specs = [*specs, *(spec for each in own.values() for spec in each)]

    @property
    def runs_programs(self) -> bool:
        return any(functions.runs_programs for functions in self._all.values())

    def of(self, entry: str) -> RewardFunctions:
        return self._all.get(entry, self._all[""])

    def about(self) -> dict[str, Any]:
        """Returns what the reward worker needs. By entry: `at_limit`, `asks` (whether it has async
        functions) and `converses` (whether one is told the prompt's messages)."""
        every = self._all.values()
        limits = [functions.reads_last for functions in every]
        return {
            "digest": " ".join(functions.digest for functions in every),
            "reads_last": None if None in limits else max(limit for limit in limits if limit is not None),
            "at_limit": {name: asdict(functions.at_limit("")) for name, functions in self._all.items()},
            "canaries": [{"label": label, "canary": asdict(canary)} for label, canary in self._canaries()],
            "asks": {name: any(functions.asynchronous()) for name, functions in self._all.items()},
            "converses": {name: functions.reads_conversation for name, functions in self._all.items()},
            "asynchronous": [label for functions in every for label, _ in functions.asynchronous()],
            "without_canary": [label for functions in every for label in functions.without_canary()],
        }

    def _canaries(self) -> list[tuple[str, Canary]]:
        return [each for functions in self._all.values() for each in functions.canaries()]

    def score_alone(self, label: str, canary: Canary) -> float:
        functions = next(functions for functions in self._all.values() if label in functions.labels)
        return functions.score_alone(label, canary)

    def warm_up(self) -> None:
        """Runs ready functions once, so that children inherit their caches (parser tables). User-defined functions are
        not run: they might start threads, which do not survive a fork."""
        labels = [label for functions in self._all.values() for label in functions.labels]
        ready = {label for label, spec in zip(labels, self._specs, strict=True) if ready_name(spec.path)}
        for label, canary in self._canaries():
            if label in ready:
                self.score_alone(label, canary)
