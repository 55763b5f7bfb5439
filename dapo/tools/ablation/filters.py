"""Filters groups by another number than the paper does, to compare (`filter_groups.function`)."""

from dapo.types import Group


def by_reward(group: Group, min_scored: int) -> str:
    """Calls a group mixed when its shaped rewards differ, penalties included: also one whose answers are all wrong."""
    scores = [score for score in group.scores if score.accuracy == score.accuracy]
    if len(scores) < min_scored:
        return "unscorable"
    if len({score.reward for score in scores}) > 1:
        return "mixed"
    return "all_correct" if scores[0].accuracy > 0.5 else "all_wrong"
