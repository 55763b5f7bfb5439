"""Holds the driver's part of a checkpoint, and what a run that goes on from one is told.

In: the state of one moment. Out: `driver.json`, `groups.parquet` (`dapo.sampling.saved`), `history.parquet` and, with a
curriculum, `order.json` (`dapo.data.order`).
"""

from dataclasses import dataclass
from pathlib import Path

from dapo.data.order import SavedOrder
from dapo.sampling.driver_state import DriverState
from dapo.sampling.saved import write_groups
from dapo.types import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """Holds what the driver adds to a checkpoint, all of one moment. order: of the draws, with the history of the
    prompts. held: groups, each with the policy version at its start. names: (draw, that version) of each."""

    state: DriverState
    order: SavedOrder
    held: list[tuple[Group, int]]
    names: set[tuple[int, int]]

    def write(self, directory: Path) -> None:
        """Writes it all; `driver.json` comes last."""
        write_groups(directory, self.held)
        self.order.write(directory)
        self.state.write(directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Says where a run goes on. directory: the checkpoint; None: there is none, and `version` is 0. groups: how many it
    holds. journaled: how many finished after it."""

    version: int
    directory: Path | None
    groups: int
    journaled: int

    @property
    def where(self) -> str:
        """Returns words for it; "" for a run that begins."""
        journal = f"{self.journaled} groups of the journal" if self.journaled else ""
        return " and ".join([str(part) for part in (self.directory, journal) if part])
