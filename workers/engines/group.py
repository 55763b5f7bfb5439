"""Follows one group on the driver: where it is generated, which of its responses have not ended and what they have.

In: parts of responses, as engines give them. Out: whole ones; or what there is of them, where the group is not wanted.
"""

from dataclasses import dataclass
from typing import Any

from dapo.types import Response
from workers.engines.slot import EngineSlot
from workers.engines.unfinished import Unfinished


@dataclass(kw_only=True, slots=True)
class RunningGroup:
    """Follows a group from its start to its last response. left: responses that have not ended, by number. home: where
    it is generated, and by which start of that engine; None while it waits for one. aborted, put_down: its engine was
    asked to end it, for good or until another takes it up.
    """

    left: dict[int, Unfinished]
    background: bool = False
    home: tuple[EngineSlot, Any] | None = None
    aborted: bool = False
    put_down: bool = False

    def runs_on(self, slot: EngineSlot) -> None:
        """Notes which engine generates it from now on."""
        self.home, self.put_down = (slot, slot.worker), False

    def take(self, number: int, part: Response) -> Response | None:
        """Takes the next part of a response; returns the response if it has ended."""
        response = self.left[number].add(part)
        if response.aborted and self.put_down and not self.aborted:
            return None
        del self.left[number]
        return response

    def cut_off(self) -> list[tuple[int, Response]]:
        """Ends what no engine will take up; returns it with what was put down of it."""
        rest = [(number, unfinished.so_far) for number, unfinished in self.left.items()]
        self.left.clear()
        return rest
