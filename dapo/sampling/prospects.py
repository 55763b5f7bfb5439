"""Foretells what draws in flight will give from the verdicts that they have so far: verdicts in, expected groups out.

A group with two verdicts that differ is mixed, whatever its longest response will be; one whose verdicts agree is the
less likely to be, the more there are. What groups in the same state gave before says how likely.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dapo.sampling.demand import Forecast

DIFFER = -1  # the state of a draw with verdicts that differ; else the number of its verdicts, which all agree


@dataclass(slots=True)
class Showing:
    """Holds what a draw in flight shows. agree: verdicts until the first that differs. accuracy: theirs."""

    agree: int = 0
    accuracy: float = math.nan
    differ: bool = False

    @property
    def state(self) -> int:
        """Returns the number of verdicts, which all agree, or DIFFER."""
        return DIFFER if self.differ else self.agree


class Prospects:
    """Knows the state of every draw in flight, and the share of usable groups among ended draws that were in it."""

    KEEP = 0.5  # weight of the steps before, at each new step
    PRIOR = 0.5  # draws of either kind that are taken to have been in every state

    def __init__(self) -> None:
        self._showing: dict[int, Showing] = {}
        self._running: Counter[int] = Counter()  # draws in flight, by state
        self._usable: dict[int, float] = {}  # draws that ended usable, by every state that they were in
        self._useless: dict[int, float] = {}  # the others

    def start(self, indices: Collection[int]) -> None:
        """Notes draws that start."""
        self._showing |= {index: Showing() for index in indices}
        self._running[0] += len(indices)

    def verdict(self, index: int, accuracy: float) -> None:
        """Notes the verdict on a response of a draw; one that cannot be scored (NaN) says nothing."""
        showing = self._showing.get(index)
        if showing is None or showing.differ or math.isnan(accuracy):
            return
        self._running[showing.state] -= 1
        if showing.agree and accuracy != showing.accuracy:
            showing.differ = True
        else:
            showing.agree, showing.accuracy = showing.agree + 1, accuracy
        self._running[showing.state] += 1

    def end(self, index: int, usable: bool) -> None:
        """Notes that a draw has all its verdicts; one whose start was not noted says nothing."""
        showing = self._forget(index)
        ended = self._usable if usable else self._useless
        for state in {*range(showing.agree + 1), showing.state} if showing else ():
            ended[state] = ended.get(state, 0.0) + 1.0

    def end_step(self, returned: Iterable[int]) -> None:
        """Forgets draws that went back to the stream, and lets older outcomes fade."""
        for index in returned:
            self._forget(index)
        for counts in (self._usable, self._useless):
            for state in counts:
                counts[state] *= self.KEEP

    def _forget(self, index: int) -> Showing | None:
        showing = self._showing.pop(index, None)
        if showing is not None:
            self._running[showing.state] -= 1
        return showing

    def expected(self, rate: float) -> Forecast:
        """Foretells the usable groups among the draws in flight. rate: share of usable ones among all draws."""
        mean = variance = 0.0
        for state, count in self._running.items():
            if not count:
                continue
            odds = rate * self._share(self._usable, state)
            p = odds / (odds + (1.0 - rate) * self._share(self._useless, state))
            mean += count * p
            variance += count * p * (1.0 - p)
        return Forecast(mean=mean, variance=variance)

    def _share(self, ended: dict[int, float], state: int) -> float:
        """Returns the share of such draws that were in that state: of all in state 0, and of all while none ended."""
        return (ended.get(state, 0.0) + self.PRIOR) / (ended.get(0, 0.0) + self.PRIOR)
