"""Gives the buffer other rules for how far ahead to draw, to compare its own with: one that knows all, one that is shy.

Each changes a new `OversamplingBuffer` in place: its `rate` and its `prospects`; all else is as in a real run.
"""

from collections.abc import Collection, Iterable

from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.demand import Forecast, UsableRate
from dapo.sampling.draws import State
from dapo.sampling.prospects import Prospects
from dapo.simulate.books import Simulation


class KnownProspects(Prospects):
    """Knows what the draws in flight will give."""

    def __init__(self, run: Simulation) -> None:
        super().__init__()
        self._run = run
        self._mixed: set[int] = set()  # draws in flight

    def start(self, indices: Collection[int]) -> None:
        """Notes draws that start."""
        self._mixed |= {index for index in indices if self._run.foretold(index).is_mixed}

    def end(self, index: int, usable: bool) -> None:
        """Notes that a draw has all its verdicts."""
        self._mixed.discard(index)

    def end_step(self, returned: Iterable[int]) -> None:
        """Forgets draws that went back to the stream."""
        self._mixed -= set(returned)

    def expected(self, rate: float) -> Forecast:
        """Counts the mixed groups in flight."""
        return Forecast(mean=len(self._mixed), variance=0.0)


class KnownDraws(UsableRate):
    """Knows what the next draws will give: allows those up to the last that an update can train on."""

    def __init__(self, run: Simulation, buffer: OversamplingBuffer) -> None:
        super().__init__(certain=False)
        self._run = run
        self._table = buffer.draws

    def allowed(self, limit: int, batch: int, there: Forecast) -> int:
        """Counts the draws up to the one that makes the last batch full, as far as there is room."""
        left, room = limit - there.mean, self._run.room()
        waiting = sorted(self._table.at(State.TO_RETRY)) if self._table.counts[State.TO_RETRY] else []
        count = 0
        while left > 0 and count < room:
            index = waiting[count] if count < len(waiting) else self._table.drawn + count - len(waiting)
            left -= self._run.foretold(index).is_mixed
            count += 1
        return count


def knowing(buffer: OversamplingBuffer, run: Simulation) -> None:
    """Lets the buffer start exactly what the updates that may train on it need: no draw too many, and none late."""
    buffer.prospects = KnownProspects(run)
    buffer.rate = KnownDraws(run, buffer)


class Deaf(Prospects):
    """Hears no verdict before a group is complete."""

    def verdict(self, index: int, accuracy: float) -> None:
        """Does nothing."""


class Shy(UsableRate):
    """Lets no group more than can be trained on come, but in 2 % of the cases."""

    SURPLUS = 0.0


def shy(buffer: OversamplingBuffer, run: Simulation) -> None:
    """Lets the buffer judge by whole groups alone, and keep two standard deviations from drawing one too many."""
    buffer.prospects, buffer.rate = Deaf(), Shy(certain=False)
