"""Makes all ranks raise the same error for a failure on some of them, so that no rank waits for another in a
collective.

The driver continues after such an error (`Unanimous`); after any other error of a rank it does not know their state.
"""

from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException


class Unanimous(RuntimeError):
    """All ranks raise it alike, at the same point, with unchanged parameters and optimizer state."""


class Refused(Unanimous):
    """The ranks refuse a call in their current state."""


class FilesError(Unanimous):
    """Some rank could not write or read files."""


class OwnWork:
    """Keeps the first error of this rank's own work, each piece in a `with`, until `meet` reports it to all ranks. No
    collective may be in the `with`: the others would wait in it. A GPU out-of-memory error is raised at once: what
    follows would fail as well."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """group: all ranks; given where `meet` must not interfere with other collectives."""
        self._error = ""
        self._group = group

    @property
    def failed(self) -> bool:
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
        """Raises FilesError on all ranks alike if the work of any rank has failed. A collective. what: the whole work,
        for the error."""
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, self._error, group=self._group)
        if found := _by_rank(dict(enumerate(errors))):
            raise FilesError(f"{what}: {found}")


def files_error(what: str, error: CheckpointException) -> FilesError:
    """Converts the exception that DCP raises on all ranks alike, without the ranks' tracebacks."""
    failures = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
    return FilesError(f"{what}: {_by_rank(failures)}")


def _by_rank(errors: dict[int, str]) -> str:
    """Formats each distinct error once, with the ranks that had it."""
    ranks: dict[str, list[str]] = {}
    for rank, error in sorted(errors.items()):
        if error:
            ranks.setdefault(error, []).append(str(rank))
    return "; ".join(f"actor rank {', '.join(those)}: {error}" for error, those in ranks.items())
