"""What becomes of a scored group, in words: the vocabulary of the buffer, the store and `dapo.inspect`."""

from enum import StrEnum


class Fate(StrEnum):
    """What an update does with a group. A new reason to drop groups is a new member.

    words: for tables and charts. remedy: what to change where many groups end so. key: the first setting to look at.
    detail: figures of one such group; may name `right`, `missing`, `truncated` and `responses`.
    """

    words: str
    key: str
    remedy: str
    detail: str

    def __new__(cls, value: str, words: str, key: str = "", remedy: str = "", detail: str = "{right}") -> "Fate":
        fate = str.__new__(cls, value)
        fate._value_, fate.words, fate.key, fate.remedy, fate.detail = value, words, key, remedy, detail
        return fate

    TRAINED = "trained", "mixed, trained on"
    ALL_CORRECT = (
        "all_correct",
        "all correct",
        "data.train_files",
        "the prompts are too easy for this policy: take harder ones",
    )
    ALL_WRONG = (
        "all_wrong",
        "all wrong",
        "rollout.n",
        "the prompts are too hard for this policy, or the reward function finds no right answer: score a few "
        "responses by hand, take more responses to each prompt, easier prompts or a stronger model",
    )
    UNSCORABLE = (
        "unscorable",
        "unscorable",
        "reward.limits.wall_s",
        "the reward function gives no verdict on too many responses: see its warnings (a missing `return`?), "
        "`python -m dapo.inspect RUN unscorable`, and `filter_groups.min_scored`",
        "{missing} of {responses} have no verdict (`filter_groups.min_scored`)",
    )
    OVERLONG = (  # mixed, but overlong filtering leaves nothing to train on
        "overlong",
        "overlong",
        "data.max_response_length",
        "what tells right from wrong is truncated and out of the loss: raise `data.max_response_length`, or set "
        "`reward.overlong_filtering.enable=false`",
        "{truncated} of {responses} truncated, no advantage in the rest (`reward.overlong_filtering`)",
    )


DROPPED = tuple(fate for fate in Fate if fate is not Fate.TRAINED)


TRAINED = Fate.TRAINED
