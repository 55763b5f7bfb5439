"""The driver's part of a checkpoint, and what a resumed run continues from. Files: `driver.json`, `groups.parquet`
(`dapo.sampling.saved`), `history.parquet` and, with a curriculum, `order.json` (`dapo.data.order`)."""

from dataclasses import dataclass
from pathlib import Path

from dapo.data.order import SavedOrder
from dapo.sampling.driver_state import DriverState
from dapo.sampling.saved import write_groups
from dapo.types import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The driver's part of a checkpoint, captured at one moment. order: prompt order with the prompt history. held:
    groups, each with the policy version at its start. names: (draw, that version) of each."""

    state: DriverState
    order: SavedOrder
    held: list[tuple[Group, int]]
    names: set[tuple[int, int]]

    def write(self, directory: Path) -> None:
        """Writes all files, `driver.json` last."""
        write_groups(directory, self.held)
        self.order.write(directory)
        self.state.write(directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Where a run continues. directory: the checkpoint; None if there is none, and `version` is 0. groups: number of
    its groups. journaled: number of groups that finished after it."""

    version: int
    directory: Path | None
    groups: int
    journaled: int

    @property
    def where(self) -> str:
        journal = f"{self.journaled} groups of the journal" if self.journaled else ""
        return " and ".join([str(part) for part in (self.directory, journal) if part])
