"""Classifies what a scored group is worth to an update: mixed, all correct, all wrong, or unscorable (DAPO Eq. 11)."""

from dapo.types import Group

MIXED = "mixed"
ALL_CORRECT = "all_correct"
ALL_WRONG = "all_wrong"
UNSCORABLE = "unscorable"
OVERLONG = "overlong"  # a mixed group of which overlong filtering leaves nothing to train on: a reason to drop it


def classify(group: Group, min_scored: int = 2) -> str:
    """Returns MIXED, ALL_CORRECT, ALL_WRONG or UNSCORABLE, from raw accuracies and never from shaped rewards (Eq. 11).

    Fewer than `min_scored` scorable responses make a group unscorable. Equal accuracies count as all correct above 0.5.
    """
    accuracies = group.accuracies
    if len(accuracies) < min_scored:
        return UNSCORABLE
    if min(accuracies) != max(accuracies):
        return MIXED
    return ALL_CORRECT if accuracies[0] > 0.5 else ALL_WRONG
