"""Steps for the sample store, made without the loop and what it imports (tests only)."""

from collections import Counter
from dataclasses import replace

from dapo.sampling.draws import TRAINED
from dapo.types import Collected, Group
from tests.support.fakes import make_group


def collected_of(groups: list[Group], fate: str = TRAINED) -> Collected:
    return Collected(
        drawn=tuple(groups),
        groups=tuple(groups),
        fates=(fate,) * len(groups),
        outcomes=Counter(),
        returned=(),
        why_returned="",
        unfinished=frozenset(),
    )


def with_text(index: int, text: str) -> Group:
    group = make_group(index, [1.0, 0.0])
    return replace(group, responses=tuple(replace(each, text=text) for each in group.responses))
