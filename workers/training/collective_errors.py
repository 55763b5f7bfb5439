"""Errors that all ranks raise alike, so that no rank waits for another in a collective, and the policy version of a
rank's weights. The driver continues after a `Unanimous`; after any other error it does not know the ranks' state."""

from collections.abc import Iterator
from contextlib import contextmanager
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


class RankVersion:
    """The policy version of a rank, 0 at first, and the operation that failed while it changed the weights."""

    def __init__(self) -> None:
        self.version = 0
        self._half_done = ""

    def check(self, what: str, version: int | None = None) -> None:
        """Raises Refused unless the weights are those of a policy version, and of `version` if given."""
        if self._half_done:
            raise Refused(
                f"the ranks refuse {what}: {self._half_done} did not come to its end, and their weights are of no "
                "policy version; load a checkpoint"
            )
        if version not in (None, self.version):
            raise Refused(
                f"the ranks refuse {what} of policy version {version}: they are at version {self.version}; load the "
                "checkpoint of that version"
            )

    @contextmanager
    def changing(self, what: str, *, to: int, or_nothing: bool) -> Iterator[None]:
        """Sets the version to `to` at the end of the block; if it raises, the weights have no version. or_nothing: a
        block that raises Unanimous has changed nothing, and the weights stay as they were."""
        before, self._half_done = self._half_done, what
        try:
            yield
        except Unanimous:
            if or_nothing:
                self._half_done = before
            raise
        self.version, self._half_done = to, ""
