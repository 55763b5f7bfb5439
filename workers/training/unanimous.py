"""Lets all ranks raise alike what went wrong on some of them, so that none waits for another in a collective.

In: a rank's own work between two collectives, such as writing a file. Out: `Unanimous` on every rank, with the errors
of all. The driver goes on with ranks that failed so; after any other error of a rank it does not know where they stand.
"""

from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException


class Unanimous(RuntimeError):
    """Says what all ranks raise alike, at the same point, with the parameters and optimizer state that they had."""


class Refused(Unanimous):
    """Says that the ranks do not do what they are asked for in the state that they are in."""


class FilesError(Unanimous):
    """Says what kept some rank from writing or reading files."""


class OwnWork:
    """Keeps the first error of this rank's own work, each piece in a `with`, until `meet` tells all ranks of it.

    No collective may be inside the `with`: the others would wait in it. A GPU out of memory is not kept: what follows
    would fail as well.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Begins with none. group: all ranks, where `meet` must keep out of the way of other collectives."""
        self._error = ""
        self._group = group

    @property
    def failed(self) -> bool:
        """Returns whether a piece of this rank's work has failed."""
        return bool(self._error)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
            return False
        self._error = self._error or f"{type(error).__name__}: {error}"
        return True

    def meet(self, what: str) -> None:
        """Returns when no rank's work has failed. A collective. what: the whole of it, for the error.

        Raises:
            FilesError: some rank's has, on all ranks alike.
        """
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, self._error, group=self._group)
        if found := _by_rank(dict(enumerate(errors))):
            raise FilesError(f"{what}: {found}")


def files_error(what: str, error: CheckpointException) -> FilesError:
    """Returns what a distributed checkpoint (DCP) raises on all ranks alike, without the ranks' tracebacks."""
    failures = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
    return FilesError(f"{what}: {_by_rank(failures)}")


def _by_rank(errors: dict[int, str]) -> str:
    """Returns one line of every error once, with the ranks that had it."""
    ranks: dict[str, list[str]] = {}
    for rank, error in sorted(errors.items()):
        if error:
            ranks.setdefault(error, []).append(str(rank))
    return "; ".join(f"actor rank {', '.join(those)}: {error}" for error, those in ranks.items())
