"""Classifies scored groups: mixed, all correct, all wrong, or unscorable (DAPO Eq. 11)."""

from collections.abc import Callable

from dapo.algorithm.fate import Fate
from dapo.algorithm.own.loading import OwnFunctionError, own_function
from dapo.config.schema import Config
from dapo.types import Group

MIXED = "mixed"
ALL_CORRECT, ALL_WRONG, UNSCORABLE = Fate.ALL_CORRECT, Fate.ALL_WRONG, Fate.UNSCORABLE
OUTCOMES = (MIXED, ALL_CORRECT, ALL_WRONG, UNSCORABLE)


def classify(group: Group, min_scored: int = 2) -> str:
    """Returns MIXED, ALL_CORRECT, ALL_WRONG or UNSCORABLE, from raw accuracies and never from shaped rewards (Eq. 11).
    Fewer than `min_scored` scorable responses make a group unscorable. Equal accuracies above 0.5 are all correct."""
    accuracies = group.accuracies
    if len(accuracies) < min_scored:
        return UNSCORABLE
    if min(accuracies) != max(accuracies):
        return MIXED
    return ALL_CORRECT if accuracies[0] > 0.5 else ALL_WRONG


def classifier(cfg: Config) -> Callable[[Group, int], str]:
    """Returns `classify`, or `filter_groups.function` in its place: only groups that it calls mixed are trained on."""
    value = cfg.filter_groups.function
    if not value:
        return classify
    own = own_function("filter_groups.function", value)

    def outcome(group: Group, min_scored: int) -> str:
        found = own(group=group, min_scored=min_scored)
        if not isinstance(found, str) or found not in OUTCOMES:
            raise OwnFunctionError(f"{own.source} gives {found!r}; give one of {', '.join(OUTCOMES)}")
        return found

    return outcome
