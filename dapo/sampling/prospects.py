"""Predicts how many draws in flight will give usable groups, from the scores they have so far. A group with two scores
that differ is mixed. If all its scores agree, it is the less likely to be mixed the more there are. The probabilities
come from earlier groups in the same state."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dapo.sampling.demand import Forecast

DIFFER = -1  # state of a draw whose scores differ; else the number of its scores, which all agree


@dataclass(slots=True)
class Showing:
    """Scores so far of a draw in flight. agree: number of scores until the first that differs. accuracy: of these."""

    agree: int = 0
    accuracy: float = math.nan
    differ: bool = False

    @property
    def state(self) -> int:
        return DIFFER if self.differ else self.agree


class Prospects:
    """The state of every draw in flight, and by state the fraction of usable groups among ended draws."""

    KEEP = 0.5  # weight of earlier steps, at each new step
    PRIOR = 0.5  # pseudo-count of usable and of useless draws in every state

    def __init__(self) -> None:
        self._showing: dict[int, Showing] = {}
        self._running: Counter[int] = Counter()  # draws in flight, by state
        self._usable: dict[int, float] = {}  # draws that ended usable, by every state that they were in
        self._useless: dict[int, float] = {}  # the others

    def start(self, indices: Collection[int]) -> None:
        self._showing |= {index: Showing() for index in indices}
        self._running[0] += len(indices)

    def verdict(self, index: int, accuracy: float) -> None:
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
        showing = self._forget(index)
        ended = self._usable if usable else self._useless
        for state in {*range(showing.agree + 1), showing.state} if showing else ():
            ended[state] = ended.get(state, 0.0) + 1.0

    def end_step(self, returned: Iterable[int]) -> None:
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
        """rate: fraction of usable groups among all draws."""
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
        """Returns the fraction of ended draws that were in that state; 1 in state 0, and while none has ended."""
        return (ended.get(state, 0.0) + self.PRIOR) / (ended.get(0, 0.0) + self.PRIOR)
